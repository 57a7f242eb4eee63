"""The incidents' command: what it is told, and that nothing it does reaches the daemon."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine_parts import Counts

from ckptgate.engine.event_tail import EventTail, Told
from ckptgate.engine.events import Event, Events
from ckptgate.ports.meters import HOOK_RUNS
from ckptgate.testing.clock import ManualClock
from ckptgate_adapters.incident_hook import IncidentHook, Limiter

KEEP = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"
HOSTILE = '$(touch /tmp/x) `id` "; rm -rf /\n\x00\x1b[2J <script>\udcff ' + "\U0001f600" * 4096


def until(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class World:
    def __init__(self, tmp: Path) -> None:
        self.tmp, self.out = tmp, tmp / "out"
        self.path = tmp / "events.jsonl"
        self.events = Events(str(self.path), clock=ManualClock())
        self.meters = Counts()
        self.hooks: list[IncidentHook] = []

    def start(
        self, *command: str, timeout_s: float = 30.0, burst: int = 100, window_s: float = 60.0
    ) -> IncidentHook:
        hook = IncidentHook(
            EventTail(str(self.path), str(self.tmp / "place")),
            command=command or (sys.executable, "-c", KEEP, str(self.out)),
            timeout_s=timeout_s,
            limiter=Limiter(burst=burst, window_s=window_s),
            about={"mountpoint": "/m"},
            meters=self.meters,
            poll_s=0.02,
        )
        self.hooks.append(hook)
        hook.start()
        return hook

    def script(self, text: str) -> str:
        path = self.tmp / "hook.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        return str(path)

    def told(self) -> list[dict[str, Any]]:
        if not self.out.exists():
            return []
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def runs(self, result: str) -> float:
        return self.meters.counted[HOOK_RUNS.name, result]

    def record(self, kind: str = "aborted", subject: str = "run/step-1", detail: str = "why"):
        self.events.record(kind, subject, detail)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for hook in made.hooks:
        hook.close()


def test_the_command_gets_the_incident_on_its_standard_input(world: World):
    world.start()
    world.record("late-member", "run/step-1.0", "too late")
    until(lambda: world.runs("ok"), "a run")
    (told,) = world.told()
    assert told["kind"] == "late-member"
    assert (told["severity"], told["subject"], told["detail"]) == (
        "critical", "run/step-1.0", "too late",
    )  # fmt: skip
    assert told["hint"]
    assert told["mountpoint"] == "/m"
    assert told["suppressed"] == 0


def test_notices_are_not_told(world: World):
    world.start()
    world.record("evicted")
    world.record("aborted")
    until(lambda: world.runs("ok"), "a run")
    assert [told["kind"] for told in world.told()] == ["aborted"]


def test_no_text_reaches_a_shell_a_command_line_or_the_environment(world: World, monkeypatch):
    """I13."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    seen = world.tmp / "seen"
    world.start(
        world.script(f'env > {seen}; echo "$@" >> {seen}; pwd >> {seen}; cat >> {world.out}')
    )
    world.record("aborted", HOSTILE, HOSTILE)
    until(lambda: world.runs("ok"), "a run")
    (told,) = world.told()
    assert told["subject"].startswith('$(touch /tmp/x) `id` "; rm -rf /\n\x00\x1b[2J <script>')
    text = seen.read_text()
    names = {line.partition("=")[0] for line in text.splitlines() if "=" in line}
    assert "SECRET" not in text
    assert names <= {"PATH", "HOME", "LANG", "LC_ALL", "TZ", "PWD", "SHLVL", "_", "OLDPWD"}
    assert "touch" not in text
    assert text.splitlines()[-1] == "/"


def test_a_command_that_fails_is_logged_and_stays_its_own(world: World, caplog):
    world.start(world.script("echo not today >&2; exit 3"))
    world.record()
    world.record()
    until(lambda: world.runs("failed") == 2, "two runs")
    assert "exit code 3: not today" in caplog.text


@pytest.mark.parametrize("command", ["/no/such/program", "/dev/null", "/"])
def test_a_command_that_cannot_be_started_is_logged(world: World, command: str, caplog):
    world.start(command)
    world.record()
    until(lambda: world.runs("failed"), "a failure")
    assert "incident-not-told" in caplog.text


def test_a_command_that_hangs_is_killed_with_what_it_started(world: World):
    pids = world.tmp / "pids"
    world.start(world.script(f"sleep 1000 & echo $! $$ > {pids}; wait"), timeout_s=0.5)
    world.record()
    until(lambda: world.runs("timeout"), "the end of its time")
    until(lambda: not any(os.path.exists(f"/proc/{pid}") and not is_dead(pid)
                          for pid in pids.read_text().split()), "both are gone")  # fmt: skip


def is_dead(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_others_are_told_while_one_hangs(world: World):
    slow = f'read line; case "$line" in *slow*) sleep 1000;; esac; echo "$line" >> {world.out}'
    world.start(world.script(slow), timeout_s=5)
    world.record(subject="slow")
    for number in range(3):
        world.record(subject=f"n{number}")
    until(lambda: len(world.told()) == 3, "the others")
    assert not world.runs("timeout")


def test_huge_output_and_a_closed_input_are_nobody_s_problem(world: World, caplog):
    huge = (
        "exec <&-; head -c 20000000 /dev/zero | tr '\\0' x; "
        "head -c 20000000 /dev/zero | tr '\\0' y >&2; exit 1"
    )
    world.start(world.script(huge))
    world.record(detail="d" * 4000)
    until(lambda: world.runs("failed"), "its end")
    (message,) = [r.getMessage() for r in caplog.records if "incident-not-told" in r.message]
    assert 900 < message.count("y") < 1100
    assert "x" * 100 not in message


def test_an_incident_whose_telling_was_cut_off_is_told_by_the_next_start(world: World):
    began = world.tmp / "began"
    hook = world.start(world.script(f"touch {began}; sleep 1000"))
    world.record(subject="cut off")
    until(began.exists, "the first run")
    hook.close()
    until(lambda: not hook._thread.is_alive(), "the first one's end")
    world.start()
    until(lambda: world.runs("ok"), "the second run")
    assert [told["subject"] for told in world.told()] == ["cut off"]


def test_what_was_told_is_not_told_by_the_next_start(world: World):
    hook = world.start()
    world.record(subject="first")
    until(lambda: world.runs("ok"), "a run")
    hook.close()
    world.start()
    world.record(subject="second")
    until(lambda: world.runs("ok") == 2, "a run")
    assert [told["subject"] for told in world.told()] == ["first", "second"]


def incident(kind: str, subject: str) -> Told:
    return Told(id=subject, event=Event(at="", kind=kind, subject=subject, detail=""))


def test_a_storm_of_one_kind_becomes_one_summary_and_keeps_no_other_from_being_told():
    limiter = Limiter(burst=2, window_s=60)
    admitted = [limiter.admit(incident("store-away", f"s{n}"), 0.0) for n in range(10)]
    assert admitted == [True, True] + [False] * 8
    assert limiter.admit(incident("aborted", "a"), 1.0)
    assert limiter.summaries(59.0) == []
    ((last, count),) = limiter.summaries(60.0)
    assert (last.event.subject, count) == ("s9", 8)
    # It goes on: one summary a window.
    assert not limiter.admit(incident("store-away", "s10"), 61.0)
    ((last, count),) = limiter.summaries(121.0)
    assert (last.event.subject, count) == ("s10", 1)
    assert limiter.summaries(500.0) == []
    assert limiter.admit(incident("store-away", "later"), 501.0)


def test_the_summary_of_a_storm_is_told(world: World):
    world.start(burst=1, window_s=0.5)
    for number in range(5):
        world.record("store-away", f"s{number}")
    until(lambda: len(world.told()) >= 2, "the summary")
    first, *_, last = world.told()
    assert first["subject"] == "s0"
    assert last["subject"] == "s4"
    assert sum(int(told["suppressed"]) for told in world.told()) == 4
    assert world.runs("suppressed") == 4
