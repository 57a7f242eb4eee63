"""Rows kept in memory are always what the database holds, whoever changed it."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptgate.errors import CkptError
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import ROOT_INO, AttemptRow, NodeKind, NodeRow
from ckptgate_adapters.sqlite_spool import SqliteSpool
from ckptgate_adapters.sqlite_spool.generation import Generation
from ckptgate_adapters.sqlite_spool.kept import KEPT_MAX, changes_kept

NODE = NodeRow(
    ino=0, kind=NodeKind.FILE, attempt=None, mode=0o644, uid=1, gid=1, size=0,
    mtime_ns=1, ctime_ns=1,
)  # fmt: skip
ATTEMPT = AttemptRow(
    id=0, run="r", run_ino=ROOT_INO, name="step-1", attempt="", job_key="", generation=-1,
    state=AttemptState.OPEN, root=9,
)  # fmt: skip


def size_of(spool: SqliteSpool, ino: int) -> int:
    found = spool.node(ino)
    assert found is not None
    return found.size


@pytest.fixture
def pair(tmp_path) -> Iterator[tuple[SqliteSpool, SqliteSpool]]:
    """The spool as two processes have it open."""
    first = SqliteSpool.create_or_open(str(tmp_path / "s"), store_url="memory://", host="n")
    second = SqliteSpool.attach(first.path)
    yield first, second
    first.close()
    second.close()


def statements(spool: SqliteSpool) -> list[str]:
    seen: list[str] = []
    spool._db._connection.set_trace_callback(seen.append)
    return seen


def test_a_row_is_read_once(pair):
    spool, _ = pair
    node = spool.add_node(NODE)
    spool.link(ROOT_INO, "a", node.ino)
    for ask in (
        lambda: spool.node(node.ino),
        lambda: spool.child(ROOT_INO, "a"),
        lambda: spool.child(ROOT_INO, "absent"),
        lambda: spool.place(node.ino),
        lambda: spool.node(12345),
    ):
        ask()
        seen = statements(spool)
        ask()
        assert seen == []


def test_of_a_directory_that_was_empty_all_names_are_known(pair):
    first, second = pair
    folder, node = first.add_node(NODE).ino, first.add_node(NODE)
    assert first.count_children(folder) == second.count_children(folder) == (0, 0)
    first.link(folder, "a", node.ino)
    seen = statements(first)
    assert first.child(folder, "a") == node
    assert first.child(folder, "b") is None
    assert seen == []
    assert second.child(folder, "a") == node
    second.link(folder, "b", second.add_node(NODE).ino)
    assert first.child(folder, "b") is not None


def test_of_what_was_kept_of_it_some_is_dropped_and_then_they_are_not(pair):
    spool, _ = pair
    folder, node = spool.add_node(NODE).ino, spool.add_node(NODE)
    spool.count_children(folder)
    spool.link(folder, "a", node.ino)
    for number in range(KEPT_MAX + 1):
        spool.child(ROOT_INO, f"absent-{number}")
    assert spool.child(folder, "a") == node


def test_a_name_whose_link_was_undone_is_in_no_directory(pair):
    spool, other = pair
    folder, node = spool.add_node(NODE).ino, spool.add_node(NODE)
    with pytest.raises(KeyError), spool.transaction():
        assert spool.count_children(folder) == (0, 0)
        spool.link(folder, "a", node.ino)
        raise KeyError
    other.link(folder, "a", node.ino)
    assert spool.child(folder, "a") == node


def test_another_process_commit_is_seen_at_once(pair):
    first, second = pair
    node = first.add_node(NODE)
    file = first.add_file()
    attempt = first.add_attempt(ATTEMPT)
    assert second.child(ROOT_INO, "a") is None
    assert second.place(node.ino) is None
    second.node(node.ino), second.file(file.file), second.attempt(attempt.id)
    with first.transaction():
        first.update_node(node.ino, size=7)
        first.update_file(file.file, state=FileState.QUIET)
        first.update_attempt(attempt.id, state=AttemptState.SEALED)
        first.link(ROOT_INO, "a", node.ino)
    assert second.node(node.ino) == first.node(node.ino)
    assert second.child(ROOT_INO, "a") == first.node(node.ino)
    assert second.place(node.ino) == (ROOT_INO, "a")
    assert [second.file(file.file), second.attempt(attempt.id)] == [
        first.file(file.file),
        first.attempt(attempt.id),
    ]
    first.unlink(ROOT_INO, "a")
    first.drop_node(node.ino)
    first.drop_file(file.file)
    assert (second.child(ROOT_INO, "a"), second.place(node.ino)) == (None, None)
    assert (second.node(node.ino), second.file(file.file)) == (None, None)


def test_what_was_rolled_back_is_forgotten(pair):
    spool, _ = pair
    node = spool.add_node(NODE)
    with pytest.raises(KeyError), spool.transaction():
        spool.update_node(node.ino, size=7)
        spool.link(ROOT_INO, "a", node.ino)
        with pytest.raises(ValueError, match="inner"), spool.transaction():
            spool.update_node(node.ino, size=8)
            raise ValueError("inner")
        assert spool.node(node.ino).size == 7
        raise KeyError
    assert spool.node(node.ino) == node
    assert spool.child(ROOT_INO, "a") is None


def test_an_open_transaction_is_seen_by_nobody_else(pair):
    first, second = pair
    node = first.add_node(NODE)
    with first.transaction():
        first.update_node(node.ino, size=7)
        assert second.node(node.ino).size == 0
    assert second.node(node.ino).size == 7


def test_a_process_that_died_in_a_commit_costs_only_time(pair):
    """I11: after it nothing is kept, until the next commit."""
    first, second = pair
    node = first.add_node(NODE)
    dying = Generation(first.path)
    dying.begin()
    dying.close()
    seen = statements(second)
    assert [second.node(node.ino), second.node(node.ino)] == [node, node]
    assert len(seen) == 2
    second.update_node(node.ino, size=3)
    assert first.node(node.ino).size == 3
    assert Generation(first.path).value() % 2 == 0
    seen.clear()
    assert second.node(node.ino).size == 3
    assert seen == []


class Interrupted:
    """A connection whose process is put aside right after its next COMMIT, while others go on."""

    def __init__(self, connection: sqlite3.Connection, meanwhile: Callable[[], None]) -> None:
        self._connection = connection
        self._meanwhile: Callable[[], None] | None = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        done = self._connection.execute(sql, *values)
        meanwhile = self._meanwhile
        if sql == "COMMIT" and meanwhile is not None:
            self._meanwhile = None
            meanwhile()
        return done


@pytest.mark.parametrize("how_many", [1, 2])
def test_a_commit_that_is_counted_late_hides_none_that_came_after_it(pair, how_many):
    """I6: a slower process would else go on with rows that another one has changed since."""
    first, second = pair
    node = first.add_node(NODE)
    assert first.child(ROOT_INO, "a") is None

    def change() -> None:
        with second.transaction():
            second.link(ROOT_INO, "a", node.ino)
        for size in range(1, how_many):
            second.update_node(node.ino, size=size)

    other = threading.Thread(target=change)

    def meanwhile() -> None:
        other.start()
        # It either gets through or waits until this commit is counted.
        other.join(0.5)

    first._db._connection = Interrupted(first._db._connection, meanwhile)
    first.set_meta("x", "1")
    other.join()
    assert first.child(ROOT_INO, "a") == second.child(ROOT_INO, "a")
    assert first.child(ROOT_INO, "a").size == how_many - 1
    with first.transaction():
        assert first.place(node.ino) == (ROOT_INO, "a")


def test_a_statement_that_nobody_accounts_for_empties_what_is_kept(pair):
    spool, _ = pair
    node = spool.add_node(NODE)
    spool._db.run("UPDATE nodes SET size = 5 WHERE ino = ?", (node.ino,))
    assert spool.node(node.ino).size == 5
    assert changes_kept('UPDATE "nodes" SET size = 5')
    assert changes_kept("DELETE FROM names")
    assert not changes_kept("INSERT OR REPLACE INTO replies VALUES (1)")


def test_a_failed_commit_keeps_nothing(pair):
    spool, other = pair
    node = spool.add_node(NODE)
    spool._db._connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(CkptError), spool.transaction():
        for number in range(2000):
            spool.update_node(node.ino, size=number, target="x" * 4000)
            spool.add_node(NODE)
    assert spool.node(node.ino) == node == other.node(node.ino)


def test_so_many_rows_are_kept_and_no_more(pair):
    spool, _ = pair
    with spool.transaction():
        for _ in range(KEPT_MAX + 10):
            spool.add_node(NODE)
    assert len(spool._db.kept().nodes) <= KEPT_MAX


def raw(path: str, ino: int, name: str) -> tuple[Any, ...]:
    connection = sqlite3.connect(f"{path}/spool.db")
    try:
        size = connection.execute("SELECT size FROM nodes WHERE ino = ?", (ino,)).fetchone()
        child = connection.execute(
            "SELECT ino FROM names WHERE parent = 1 AND name = ?", (name,)
        ).fetchone()
        place = connection.execute("SELECT name FROM names WHERE ino = ?", (ino,)).fetchone()
    finally:
        connection.close()
    return tuple(None if row is None else row[0] for row in (size, child, place))


def asked(spool: SqliteSpool, ino: int, name: str) -> tuple[Any, ...]:
    # Where it is empty the directory's names are known from then on.
    spool.count_children(ROOT_INO)
    node, child, place = spool.node(ino), spool.child(ROOT_INO, name), spool.place(ino)
    return (node and node.size, child and child.ino, place and place[1])


@pytest.mark.parametrize("seed", range(4))
def test_whatever_two_processes_do_both_read_what_the_database_holds(pair, seed):
    dice = random.Random(seed)
    inos = [pair[0].add_node(NODE).ino for _ in range(4)]
    names = ["a", "b", "c"]

    def act(spool: SqliteSpool) -> None:
        ino, name = dice.choice(inos), dice.choice(names)
        match dice.randrange(5):
            case 0 if spool.node(ino) is not None:
                spool.update_node(ino, size=dice.randrange(100))
            case 1 if spool.child(ROOT_INO, name) is None and spool.place(ino) is None:
                if spool.node(ino) is not None:
                    spool.link(ROOT_INO, name, ino)
            case 2:
                spool.unlink(ROOT_INO, name)
            case 3 if spool.place(ino) is None:
                spool.drop_node(ino)
                inos[inos.index(ino)] = spool.add_node(NODE).ino

    for _ in range(150):
        spool = dice.choice(pair)
        try:
            with spool.transaction():
                for _ in range(dice.randrange(1, 4)):
                    act(spool)
                if not dice.randrange(4):
                    raise InterruptedError
        except InterruptedError:
            alive = [ino for ino in inos if raw(spool.path, ino, "")[0] is not None]
            inos[:] = alive or [spool.add_node(NODE).ino]
        for ino in inos:
            name = dice.choice(names)
            expected = raw(spool.path, ino, name)
            assert [asked(one, ino, name) for one in pair] == [expected, expected]


WRITER = """
import sys
from ckptgate_adapters.sqlite_spool import SqliteSpool
spool = SqliteSpool.attach(sys.argv[1])
print(flush=True)
for number in range(spool.node(int(sys.argv[2])).size + 1, 10**9):
    with spool.transaction():
        spool.update_node(int(sys.argv[2]), size=number)
        spool.update_node(int(sys.argv[3]), size=number)
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_readers_right(tmp_path: Path):
    """I10: killed in or out of a commit, both rows are the same and are those of the database."""
    spool = SqliteSpool.create_or_open(str(tmp_path / "s"), store_url="memory://", host="n")
    one, two = spool.add_node(NODE).ino, spool.add_node(NODE).ino
    done = threading.Event()
    backwards: list[tuple[int, int]] = []

    def watch() -> None:
        last = 0
        while not done.is_set():
            size = size_of(spool, one)
            if size < last:
                backwards.append((last, size))
            last = size

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(4):
            with subprocess.Popen(
                [sys.executable, "-c", WRITER, spool.path, str(one), str(two)],
                stdout=subprocess.PIPE,
            ) as writer:
                assert writer.stdout is not None
                writer.stdout.readline()
                before = size_of(spool, one)
                while size_of(spool, one) < before + 50:
                    pass
                writer.kill()
            expected = raw(spool.path, one, "")[0]
            assert (size_of(spool, one), size_of(spool, two)) == (expected, expected)
    finally:
        done.set()
        watcher.join()
        spool.close()
    assert backwards == []
