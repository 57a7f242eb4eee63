"""What a service's status line says, and which child is taken for stuck."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptgate.app import watching
from ckptgate.app.config import Config
from ckptgate.app.watch_process import Report
from ckptgate.app.watching import Watching, describe, probe_patiently
from ckptgate.errors import FormatVersionError, UnusableError


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (Report(), "everything is in the store"),
        (Report(checkpoints=1), "1 checkpoint under way"),
        (
            Report(checkpoints=2, files=8, size_bytes=3 << 29, plain=1),
            "2 checkpoints under way, 8 files (1.5 GiB) to store, 1 plain change to store",
        ),
        (
            Report(away_s=3 * 86400, files=1, size_bytes=10),
            "the store is away for 3 d (nothing is lost); 1 file (10 B) to store",
        ),
        (
            Report(store_s=7200),
            "everything is in the store; the store was last heard of 2 h ago",
        ),
        (Report(mount_s=31, problem="it hangs"), "the mount does not answer for 31 s"),
        (Report(spool_s=130), "the spool does not answer for 2 min"),
    ],
)
def test_a_report_is_one_line_for_people(report: Report, line: str):
    assert line in describe(report)


class Child:
    """A process that only remembers whether it was killed."""

    kills: int

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


class Told:
    """A service manager that remembers."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def messages(self) -> list[str]:
        found: list[str] = []
        try:
            while True:
                found.append(self._listener.recv(4096).decode())
        except BlockingIOError:
            return found


@pytest.fixture
def told(tmp_path: Path, monkeypatch) -> Iterator[Told]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "60000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield Told(listener)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    where = str(tmp_path / "mnt")
    return Config(store=str(tmp_path), mountpoint=where, spool=str(tmp_path / "spool"))


def take(watch: Watching, report: Report, *children: Any) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    watch._reader = reader
    data = msgspec.json.encode(report) + b"\n"
    try:
        # It may come in pieces.
        os.write(writer, data[:10])
        watch.on_readable(children)
        os.write(writer, data[10:])
        watch.on_readable(children)
    finally:
        os.close(reader)
        os.close(writer)


def test_ready_is_told_once_and_the_watchdog_after_each_answer(told: Told, config: Config):
    watch = Watching(config, selectors.DefaultSelector())
    children = Child(1), Child(2)
    take(watch, Report(is_answered=False), *children)
    assert told.messages() == []
    take(watch, Report(is_answered=True), *children)
    take(watch, Report(is_answered=True, away_s=10 * 86400), *children)
    first, second = told.messages()
    assert "READY=1" in first
    assert "READY=1" not in second
    # A store that is away for days ends nothing.
    assert "WATCHDOG=1" in first
    assert "WATCHDOG=1" in second
    assert not any(child.kills for child in children)


def test_only_the_child_that_stands_in_the_way_is_killed_and_only_once(told: Told, config: Config):
    watch = Watching(config, selectors.DefaultSelector())
    mount, publisher = Child(11), Child(12)
    take(watch, Report(is_answered=True, mount_s=29), mount, publisher)
    assert not mount.kills
    for _ in range(3):
        take(watch, Report(is_answered=True, mount_s=31), mount, publisher)
    assert (mount.kills, publisher.kills) == (1, 0)
    take(watch, Report(is_answered=True, spool_s=31, holder=12), mount, publisher)
    assert (mount.kills, publisher.kills) == (1, 1)
    # Somebody else's lock: nobody here is to blame.
    take(watch, Report(is_answered=True, spool_s=50, holder=4711), mount, publisher)
    assert (mount.kills, publisher.kills) == (1, 1)
    assert not any("WATCHDOG" in message for message in told.messages())
    take(watch, Report(is_answered=True), mount, publisher)
    take(watch, Report(is_answered=True, mount_s=31), mount, publisher)
    assert (mount.kills, publisher.kills) == (2, 1)


def test_without_a_manager_nothing_is_started(monkeypatch, config: Config):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    selector = selectors.DefaultSelector()
    watch = Watching(config, selector)
    watch.start()
    assert not selector.get_map()
    watch.stop()


def test_a_watch_that_ends_is_started_again_and_gone_in_the_end(told: Told, config: Config):
    selector = selectors.DefaultSelector()
    watch = Watching(config, selector)
    watch.start()
    try:
        assert watch._process is not None
        first = watch._process.pid
        watch._process.kill()
        watch._process.wait()
        assert selector.select(30)
        watch.on_readable((None, None))
        assert watch._process.pid != first
    finally:
        last = watch._process
        watch.stop()
        assert last is not None
        last.wait()
    assert not selector.get_map()
    watch.start()
    assert watch._process is None


def test_a_start_waits_for_a_store_that_is_away_and_for_nothing_else(
    told: Told, config: Config, monkeypatch
):
    answers: list[Exception | None] = [UnusableError("no route"), UnusableError("no route"), None]
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def probe(_config: Config) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(watching, "probe_store", probe)
    probe_patiently(config)
    assert answers == []
    waiting = [message for message in told.messages() if message.startswith("STATUS")]
    assert waiting == ["STATUS=waiting for the store: no route"] * 2
    answers.append(FormatVersionError("version 9"))
    with pytest.raises(FormatVersionError):
        probe_patiently(config)
    monkeypatch.delenv("NOTIFY_SOCKET")
    answers.append(UnusableError("no route"))
    with pytest.raises(UnusableError):
        probe_patiently(config)
