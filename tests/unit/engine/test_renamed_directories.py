"""A directory that one node renames while others write in it, and speak of it, stays one."""

from __future__ import annotations

import random

import pytest
from tests.unit.engine.kit import Node

from ckptgate.model.merge import merge_votes
from ckptgate.model.moves import Move, taken
from ckptgate.ports.spool import AttemptRow, NameOpRow, NodeKind
from ckptgate_adapters.memory_store import MemoryStore


@pytest.fixture
def store():
    """What is told of renames depends on no store's ways."""
    return MemoryStore()


@pytest.fixture
def trio(make_node):
    """Three nodes that have joined one attempt."""
    nodes = [make_node(host) for host in "abc"]
    return [(node, node.membership.join(node.begin("step-1"))) for node in nodes]


def queue(node: Node, row: AttemptRow, op: str, path: str, to: str = "") -> None:
    """Note an operation with what its paths have in them, as the mount does."""
    after = {m: c for m, c in taken(node.spool.moves(row.id)).items() if m != node.member}
    if op == "rename":
        now = node.spool.attempt(row.id)
        assert now is not None
        n = now.names_count + len(node.spool.name_ops(row.id))
        node.spool.add_move(row.id, Move(member=node.member, n=n, path=path, to=to))
    node.spool.add_name_op(
        NameOpRow(id=0, attempt=row.id, op=op, path=path, to=to, mode=0o755, after=after)
    )


def send(node: Node, row: AttemptRow) -> None:
    node.membership.send_name_ops(row)


def mkdir(node: Node, row: AttemptRow, path: str) -> None:
    parent = row.root
    for part in path.split("/"):
        parent = node.directory(parent, part, row.id)
    queue(node, row, "mkdir", path)


def rename(node: Node, row: AttemptRow, path: str, to: str) -> None:
    tree = dict(node.spool.tree(row.id))
    above, _, name = to.rpartition("/")
    with node.spool.transaction():
        place = node.spool.place(tree[path].ino)
        assert place is not None
        node.spool.unlink(*place)
        node.spool.link(tree[above].ino if above else row.root, name, tree[path].ino)
        queue(node, row, "rename", path, to)


def test_an_older_vote_never_makes_a_renamed_directory_again(trio):
    """On the other node what is written there then would be a second half of it."""
    (a, row_a), (b, row_b), _ = trio
    mkdir(a, row_a, "tmp/sub")
    a.stage(row_a, "tmp/sub/0", b"0")
    send(a, row_a)
    a.vote(row_a, is_final=False)
    rename(a, row_a, "tmp", "final")
    send(a, row_a)
    assert b.catalog.refresh_shared(row_b.id)
    assert set(b.paths(row_b)) == {"final", "final/sub", "final/sub/0"}
    a.vote(row_a, is_final=False)
    b.catalog.refresh_shared(row_b.id)
    assert set(b.paths(row_b)) == {"final", "final/sub", "final/sub/0"}


def test_an_older_vote_of_another_never_makes_it_again_where_it_was_renamed(trio):
    (a, row_a), (b, row_b), _ = trio
    mkdir(a, row_a, "tmp/sub")
    send(a, row_a)
    b.catalog.refresh_shared(row_b.id)
    b.stage(row_b, "tmp/sub/1", b"1")
    b.vote(row_b, is_final=False)
    a.catalog.refresh_shared(row_a.id)
    rename(a, row_a, "tmp", "final")
    b.stage(row_b, "tmp/sub/2", b"2")
    b.vote(row_b, is_final=False)
    assert a.catalog.refresh_shared(row_a.id)
    whole = {"final", "final/sub", "final/sub/1", "final/sub/2"}
    assert set(a.paths(row_a)) == whole
    send(a, row_a)
    b.catalog.refresh_shared(row_b.id)
    assert set(b.paths(row_b)) == whole


def test_a_mkdir_from_before_a_rename_makes_its_directory_at_the_new_place(trio):
    (a, row_a), (b, row_b), (c, row_c) = trio
    mkdir(a, row_a, "tmp")
    send(a, row_a)
    b.catalog.refresh_shared(row_b.id)
    mkdir(b, row_b, "tmp/of_b")
    rename(a, row_a, "tmp", "final")
    send(a, row_a)
    # Not yet sent when the rename is taken over: it says what it was said with.
    b.catalog.refresh_shared(row_b.id)
    send(b, row_b)
    for node, row in ((a, row_a), (b, row_b), (c, row_c)):
        node.catalog.refresh_shared(row.id)
        assert set(node.paths(row)) == {"final", "final/of_b"}, node.host


def test_a_directory_of_the_old_name_that_is_made_after_the_rename_is_another_one(trio):
    (a, row_a), (b, row_b), (c, row_c) = trio
    mkdir(a, row_a, "tmp")
    rename(a, row_a, "tmp", "final")
    send(a, row_a)
    b.catalog.refresh_shared(row_b.id)
    mkdir(b, row_b, "tmp")
    send(b, row_b)
    b.stage(row_b, "tmp/x", b"x")
    b.vote(row_b, is_final=False)
    for node, row in ((a, row_a), (c, row_c)):
        node.catalog.refresh_shared(row.id)
        assert set(node.paths(row)) == {"final", "tmp", "tmp/x"}, node.host


def test_an_operation_is_applied_after_those_that_it_came_after(trio, make_node):
    """However the lists are asked for, and whoever is asked first."""
    (a, row_a), (b, row_b), _ = trio
    mkdir(a, row_a, "one")
    send(a, row_a)
    for number in range(4):
        (mover, row), (other, other_row) = ((a, row_a), (b, row_b))[:: 1 if number % 2 else -1]
        mover.catalog.refresh_shared(row.id)
        name = next(iter(mover.paths(row)))
        rename(mover, row, name, f"{name}-{number}")
        send(mover, row)
        del other, other_row
    for host in "defgh":
        late = make_node(host)
        row = late.membership.join(late.begin("step-1"))
        late.membership.refresh_moves(row)
        late.catalog.refresh_shared(row.id)
        assert set(late.paths(row)) == {"one-0-1-2-3"}, host


def test_a_vote_that_came_after_an_unknown_rename_waits_for_it(trio):
    (a, row_a), (b, row_b), (c, row_c) = trio
    mkdir(a, row_a, "tmp")
    send(a, row_a)
    c.catalog.refresh_shared(row_c.id)
    rename(a, row_a, "tmp", "final")
    send(a, row_a)
    b.catalog.refresh_shared(row_b.id)
    b.stage(row_b, "final/x", b"x")
    b.vote(row_b, is_final=False)
    shared = c.membership._shared
    votes = c.membership.newest_votes("run", row_c.attempt, [b.member])
    assert not shared.take_files(row_c, votes)
    assert set(c.paths(row_c)) == {"tmp"}
    assert c.catalog.refresh_shared(row_c.id)
    assert set(c.paths(row_c)) == {"final", "final/x"}


class Chance:
    """Three nodes that make, rename and fill directories at random; only *movers* rename."""

    def __init__(self, trio: list[tuple[Node, AttemptRow]], seed: int, movers: int) -> None:
        self.trio = trio
        self.random = random.Random(seed)
        self.movers = movers
        self.files: dict[str, tuple[str, int]] = {}
        self.number = 0

    def act(self) -> None:
        at = self.random.randrange(3)
        node, row = self.trio[at]
        directories = [p for p, n in node.spool.tree(row.id) if n.kind is NodeKind.DIR]
        kinds = ["mkdir", "file", "file", "vote", "vote", "refresh", "refresh", "moves", "send"]
        kind = self.random.choice([*kinds, *(["rename"] * 2 if at < self.movers else [])])
        self.number += 1
        if kind == "mkdir":
            above = self.random.choice(["", *directories])
            mkdir(node, row, f"{above}/d{self.number}".lstrip("/"))
        elif kind == "file" and directories:
            path = f"{self.random.choice(directories)}/f{self.number}"
            file = node.stage(row, path, b"%d" % self.number)
            self.files[f"f{self.number}"] = (node.host, file)
        elif kind == "rename" and directories:
            path = self.random.choice(directories)
            above = self.random.choice(
                [""] + [d for d in directories if d != path and not d.startswith(f"{path}/")]
            )
            rename(node, row, path, f"{above}/r{self.number}".lstrip("/"))
        elif kind == "vote":
            send(node, row)
            node.vote(row, is_final=False)
        elif kind == "refresh":
            node.catalog.refresh_shared(row.id)
        elif kind == "moves":
            node.membership.refresh_moves(row)
        elif kind == "send":
            send(node, row)

    def finish(self) -> list[set[str]]:
        """The paths of all trees once everybody knows everything, and what would be committed."""
        for node, row in self.trio:
            send(node, row)
        for node, row in self.trio:
            node.membership.refresh_moves(row)
        votes = {node.member: node.vote(row) for node, row in self.trio}
        for node, row in self.trio:
            node.catalog.refresh_shared(row.id)
        entries, problems = merge_votes(votes)
        assert not problems
        return [{entry.path for entry in entries}, *(set(n.paths(r)) for n, r in self.trio)]


@pytest.mark.parametrize("seed", range(40))
def test_all_trees_become_one_whatever_is_renamed_by_one_of_them(trio, seed):
    chance = Chance(trio, seed, movers=1)
    for _ in range(60):
        chance.act()
    committed, *trees = chance.finish()
    assert all(tree == trees[0] for tree in trees)
    assert committed <= trees[0]
    assert {path for path in trees[0] if "f" in path.rpartition("/")[2]} <= committed
    names = [path.rpartition("/")[2] for path in committed]
    assert sorted(name for name in names if name.startswith("f")) == sorted(chance.files)
    assert len(names) == len(set(names)), "a directory is there twice"
