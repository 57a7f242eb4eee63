"""What the supervisor tells a service manager: ready, alive, and what is under way.

Owns three rules. Ready means that a look through the mount was answered. The watchdog is told only
after looks at mount and spool that were answered, whatever the store does. And a child that has not
answered for half of the watchdog's time is killed and started again before the manager ends
everything: its successor goes on with the same kernel session. Nothing happens where no manager
listens. Supervisor's thread only.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
import time
from typing import Final, TypeAlias

import msgspec

from ckptgate.app.config import Config
from ckptgate.app.stores import probe_store
from ckptgate.app.watch_process import Report
from ckptgate.errors import TransientStoreError, UnusableError
from ckptgate_adapters.systemd import has_manager, notify, watchdog_s

__all__ = ["Watching", "describe", "probe_patiently"]

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 15.0
_LOOKS_IN_A_WATCHDOG: Final = 6
_REPORT_BYTES_MAX: Final = 1 << 16
_STARTS_MAX: Final = 1000
_SILENT_SHARE: Final = 0.5
_STORE_WAIT_S: Final = 60.0
"""A start waits that long for a store that is away; the unit gives it 100 s."""
_STORE_PAUSE_S: Final = 2.0
_PROBE_S: Final = 600.0
_UNITS: Final = ("B", "KiB", "MiB", "GiB")

_Process: TypeAlias = subprocess.Popen[bytes]


def probe_patiently(config: Config) -> None:
    """As `probe_store`; where a service manager starts it, a store that is away is waited for.

    Raises:
        CkptError: the store can't be used, or is still away.
    """
    deadline = time.monotonic() + _STORE_WAIT_S
    while True:
        # One look alone may take its time, where the store answers nothing at all.
        notify(f"EXTEND_TIMEOUT_USEC={int(_PROBE_S * 1e6)}")
        try:
            probe_store(config)
        except (UnusableError, TransientStoreError) as exc:
            if not has_manager() or time.monotonic() >= deadline:
                raise
            _log.warning("store-awaited error=%s", exc)
            notify(f"STATUS=waiting for the store: {exc}")
            time.sleep(_STORE_PAUSE_S)
        else:
            return


class Watching:
    """The watch process, and what follows from its reports."""

    def __init__(self, config: Config, selector: selectors.BaseSelector) -> None:
        self._config = config
        self._selector = selector
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = -1
        self._rest = b""
        self._is_ready = False
        self._is_over = not has_manager()
        self._starts = 0
        self._killed: set[int] = set()
        limit_s = watchdog_s()
        self._limit_s = limit_s
        self._interval_s = (
            _INTERVAL_S if limit_s is None else min(_INTERVAL_S, limit_s / _LOOKS_IN_A_WATCHDOG)
        )

    def start(self) -> None:
        """Begin to watch, once somebody serves the mount."""
        if self._is_over or self._starts >= _STARTS_MAX:
            return
        self._starts += 1
        reader, writer = os.pipe2(os.O_CLOEXEC)
        command = [sys.executable, "-P", "-m", "ckptgate.app.watch_process", self._config.spool]
        command += [self._config.mountpoint, str(os.getpid()), f"{self._interval_s:g}"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer)
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self._reader, self._rest = reader, b""
        self._selector.register(reader, selectors.EVENT_READ, self)

    def stop(self) -> None:
        """Watch no longer: it is being stopped, for which the manager has a time of its own."""
        self._is_over = True
        self._forget()

    def _forget(self) -> None:
        if self._process is None:
            return
        self._selector.unregister(self._reader)
        os.close(self._reader)
        # Not waited for: it may be in a call that ends only when the mount does.
        self._process.kill()
        self._process.poll()
        self._process = None

    def on_readable(self, children: tuple[_Process | None, _Process | None]) -> None:
        """Take what the watch said.

        Args:
            children: the mount and the publisher; one that doesn't answer is killed.
        """
        try:
            data = os.read(self._reader, _REPORT_BYTES_MAX)
        except BlockingIOError:
            return
        if not data:
            _log.warning("watch-ended: starting it again")
            self._forget()
            self.start()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(msgspec.json.decode(line, type=Report), children)

    def _take(self, report: Report, children: tuple[_Process | None, _Process | None]) -> None:
        if not report.is_answered:
            return
        fields = [f"STATUS={describe(report)}"]
        if not self._is_ready:
            self._is_ready = True
            fields.append("READY=1")
            _log.info("ready mountpoint=%s", self._config.mountpoint)
        is_alive = not report.mount_s and not report.spool_s
        if is_alive:
            fields.append("WATCHDOG=1")
        notify(*fields)
        if is_alive:
            self._killed.clear()
        elif self._limit_s is not None:
            self._replace_stuck(report, children, self._limit_s * _SILENT_SHARE)

    def _replace_stuck(
        self,
        report: Report,
        children: tuple[_Process | None, _Process | None],
        limit_s: float,
    ) -> None:
        """Kill the child that stands in the way for longer than that; it is started again."""
        mount, _ = children
        stuck: _Process | None = None
        if report.mount_s >= limit_s:
            _log.error("mount-stuck silent_s=%.0f problem=%r", report.mount_s, report.problem)
            stuck = mount
        elif report.spool_s >= limit_s:
            _log.error("spool-stuck silent_s=%.0f pid=%d", report.spool_s, report.holder)
            stuck = next((c for c in children if c is not None and c.pid == report.holder), None)
        if stuck is not None and stuck.pid not in self._killed:
            self._killed.add(stuck.pid)
            stuck.kill()


def describe(report: Report) -> str:
    """The report in one line for people."""
    waiting = _waiting(report)
    parts = [waiting or "everything is in the store"]
    if report.away_s:
        parts.insert(0, f"the store is away for {_duration(report.away_s)} (nothing is lost)")
    elif report.store_s > 2 * _INTERVAL_S + 60:
        parts.append(f"the store was last heard of {_duration(report.store_s)} ago")
    if report.mount_s:
        parts.insert(0, f"the mount does not answer for {_duration(report.mount_s)}")
    if report.spool_s:
        parts.insert(0, f"the spool does not answer for {_duration(report.spool_s)}")
    if report.problem:
        parts.append(report.problem)
    return "; ".join(parts)


def _waiting(report: Report) -> str:
    parts: list[str] = []
    if report.checkpoints:
        plural = "s" if report.checkpoints > 1 else ""
        parts.append(f"{report.checkpoints} checkpoint{plural} under way")
    if report.files:
        plural = "s" if report.files > 1 else ""
        parts.append(f"{report.files} file{plural} ({_size(report.size_bytes)}) to store")
    if report.plain:
        plural = "s" if report.plain > 1 else ""
        parts.append(f"{report.plain} plain change{plural} to store")
    return ", ".join(parts)


def _size(size: float) -> str:
    unit = _UNITS[0]
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _duration(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
