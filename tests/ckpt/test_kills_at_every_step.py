"""kill -9 of whoever takes part in a save by `ckpt://`, at each of its own steps.

The writer's steps are its requests and its writes; it is started again, as another incarnation of
its job. The daemon's processes count their changes of the database and of the store
(`tests/e2e/faulty`), and their supervisor starts them again. Either way the checkpoint is the one
of a save without a kill, and until then nobody sees any of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ckpt.places import Place, placed
from tests.e2e import harness
from tests.e2e.harness import tree, until

from ckptgate.app.asking import ask
from ckptgate_adapters.fsspec_ckpt import connection, messages, writers

FAULTY = Path(harness.__file__).with_name("faulty")
FILES = {"sub/a.bin": b"again" * 10_000, "b.bin": b"b"}
KILLS_PER_DAEMON = 12
"""A supervisor gives up a child that dies more than 20 times in a minute."""


def save(fs: Any, path: str) -> None:
    """All kinds of requests that a save makes."""
    fs.makedirs(f"{path}/sub", exist_ok=True)
    with fs.open(f"{path}/sub/a.bin", "wb") as file:
        file.write(b"a" * 300_000)
    with fs.open(f"{path}/sub/a.bin", "wb") as file:
        file.write(FILES["sub/a.bin"])
    fs.pipe(f"{path}/b.tmp.bin", FILES["b.bin"])
    fs.mv(f"{path}/b.tmp.bin", f"{path}/b.bin")
    fs.pipe(f"{path}/c.bin", b"c")
    fs.rm_file(f"{path}/c.bin")
    fs.commit(path, 0, 1)


def seen(fs: Any, path: str) -> dict[str, bytes]:
    """The files that a reader finds there."""
    try:
        found = fs.find(path)
    except FileNotFoundError:
        return {}
    return {name.removeprefix(f"{path}/"): fs.cat(name) for name in found}


def check(place: Place, reader: Any, path: str) -> None:
    """What a save without a kill leaves."""
    published = Path(place.store, path)
    until(f"the publication of {path}", published.is_dir, 60)
    until(f"all of {path}", lambda: tree(published) == FILES)
    assert seen(reader, path) == FILES
    manifest = json.loads((published / ".ckptgate/manifest.json").read_text())
    entries = [(entry["path"], entry["type"]) for entry in manifest["entries"]]
    assert entries == [("b.bin", "file"), ("sub", "dir"), ("sub/a.bin", "file")]


# The writer


def _dying(n: int, *, is_after: bool) -> None:
    """Have this process killed before or after its n-th step."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*words: Any) -> Any:
            nonlocal count
            count += 1
            is_it = count == n
            if is_it and not is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*words)
            if is_it:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return step

    exchange, write = connection._exchange, writers._RawWriter.write

    def exchanged(sock: Any, request: messages.Request) -> Any:
        is_hello = isinstance(request, messages.Hello)
        return exchange(sock, request) if is_hello else counted_exchange(sock, request)

    counted_exchange = counted(exchange)
    connection._exchange = exchanged  # type: ignore[assignment]
    writers._RawWriter.write = counted(write)  # type: ignore[method-assign]


def written(place: Place, path: str, job: str, n: int = 0, *, is_after: bool = False) -> bool:
    """Save as a process of its own; whether it was killed."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            if n:
                _dying(n, is_after=is_after)
            save(place.fs(job=job), path)
            code = 0
        except BaseException:  # noqa: BLE001 - the end of a process that must not go on as a test
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def killed_and_again(place: Place, run: str, plans: list[tuple[int, bool]]) -> list[bool]:
    """A save under each kill, and again by a new incarnation; which kills took place."""
    reader = place.fs(job="reader")
    hits = []
    for number, (n, is_after) in enumerate(plans):
        path = f"{run}/{number}/step-1"
        hits.append(written(place, path, f"{run}-{number}", n, is_after=is_after))
        assert seen(reader, path) in ({}, FILES), (n, is_after)
        if hits[-1]:
            assert not written(place, path, f"{run}-{number}-again")
        assert seen(reader, path) in ({}, FILES), (n, is_after)
    for number in range(len(plans)):
        check(place, reader, f"{run}/{number}/step-1")
    info = place.info()
    assert info is not None
    rows = [row for row in ask(info, {"op": "status"})["attempts"] if row["run"].startswith(run)]
    assert {row["state"] for row in rows} <= {"committed", "abandoned", "replaced"}, rows
    return hits


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_writer_killed_now_and_then_leaves_nothing_and_is_followed_by_another(place, run):
    """I2, I8, I10, I12."""
    chance = random.Random(7)
    plans = [(chance.randrange(1, 30), bool(chance.randrange(2))) for _ in range(5)]
    hits = killed_and_again(place, run, plans)
    assert sum(hits) >= 3


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_writer_killed_at_any_step_leaves_nothing_and_is_followed_by_another(
    place, run, is_after
):
    """I2, I8, I10, I12: for every n, until a save has no such step any more."""
    for start in range(1, 400, 10):
        plans = [(n, is_after) for n in range(start, start + 10)]
        hits = killed_and_again(place, f"{run}/{start}", plans)
        if not any(hits):
            assert start > 20
            return
    pytest.fail("a save never ended")


# The daemon's processes


class Faulty:
    """Daemons whose children die as told, and a new run for each save."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.plan = base / "fault.json"
        paths = [str(FAULTY), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        monkeypatch.setenv("FAULTS_OF_TEST", str(self.plan))

    def saves(self, plans: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool]]:
        """A save under each plan; yields it and whether it took place."""
        for start in range(0, len(plans), KILLS_PER_DAEMON):
            base = self.base / f"place{start}"
            base.mkdir()
            with placed(base) as made:
                for number, plan in enumerate(plans[start : start + KILLS_PER_DAEMON]):
                    yield plan, self.save(made, f"run{number}/step-1", plan)

    def save(self, made: Place, path: str, plan: dict[str, Any]) -> bool:
        fs, reader = made.fs(), made.fs(job="reader")
        # A publisher that has just been started has steps of its own.
        assert ask(
            until("the daemon", lambda: fs.ls("") is not None and made.info()), {"op": "left"}
        )
        self.plan.with_suffix(".new").write_text(json.dumps(plan))
        self.plan.with_suffix(".new").rename(self.plan)
        save(fs, path)
        assert seen(reader, path) in ({}, FILES), plan
        check(made, reader, path)
        is_hit = not self.plan.exists()
        self.plan.unlink(missing_ok=True)
        return is_hit


def kills(process: str, call: str, places: list[int], **more: Any) -> list[dict[str, Any]]:
    return [
        {"process": process, "call": call, "at": at, "kill": when, **more}
        for at in places
        for when in ("before", "after")
    ]


PLACES = [("publisher", "statement", 60), ("publisher", "store", 60), ("clients", "statement", 60)]


def test_a_save_under_kills_of_the_daemon_is_the_save_without(tmp_path: Path, monkeypatch):
    """I1, I8, I10, I11: at places drawn from all steps of a save, of either process and of both."""
    chance = random.Random(3)
    plans: list[dict[str, Any]] = []
    for process, call, count in PLACES:
        at = chance.randrange(1, count)
        plans += chance.sample(kills(process, call, [at], both=bool(chance.randrange(2))), 1)
    hits = [is_hit for _, is_hit in Faulty(tmp_path, monkeypatch).saves(plans)]
    assert sum(hits) >= len(plans) // 2


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("both", [False, True], ids=["one", "both"])
@pytest.mark.parametrize(("process", "call", "count"), PLACES)
def test_a_save_under_a_kill_of_the_daemon_at_any_step(
    tmp_path, monkeypatch, process, call, count, both
):
    """I1, I8, I10, I11: for every n, until a save has no such step any more."""
    misses = 0
    plans = kills(process, call, list(range(1, 400)), both=both)
    for plan, is_hit in Faulty(tmp_path, monkeypatch).saves(plans):
        misses = 0 if is_hit else misses + 1
        if misses == 4:
            assert plan["at"] > 3
            return
    pytest.fail("a save never ended")
