"""Runs the operator's command for each incident, with the incident as JSON on its standard input.

It owns what the command can do to the daemon: nothing. It runs on threads of its own, without a
shell, in a session of its own, with a few variables and no descriptor of the daemon's, and is
killed after its time; its output is read and thrown away but for the beginning of its errors. A
storm of one kind becomes one summary. Told at least once (see `engine.event_tail`).

Thread rule: `start` and `close` belong to one thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from ckptgate.engine.event_tail import EventTail, Told
from ckptgate.model.incidents import Severity, incident_kind
from ckptgate.ports.meters import HOOK_RUNS, NO_METERS, Meters

__all__ = ["IncidentHook", "Limiter"]

_log = logging.getLogger(__name__)

_PARALLEL: Final = 4
_POLL_S: Final = 1.0
_PIPE_BYTES: Final = 65536
_ERRORS_KEPT: Final = 1000
_REAP_S: Final = 5.0
_END_S: Final = 1.0
_LOOK_S: Final = 0.25
_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")
"""All else stays here: credentials, for one."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True)
class _Window:
    """Incidents of one kind since *began_s*: how many were told, how many not, the last of them."""

    began_s: float
    told: int = 0
    left: int = 0
    last: Told | None = None


class Limiter:
    """At most *burst* runs for one kind in *window_s* seconds; the rest becomes one summary."""

    def __init__(self, *, burst: int, window_s: float) -> None:
        self._burst = burst
        self._window_s = window_s
        self._windows: dict[str, _Window] = {}

    def admit(self, told: Told, now_s: float) -> bool:
        """Whether the command is run for it now."""
        window = self._windows.setdefault(told.event.kind, _Window(now_s))
        if window.told < self._burst:
            window.told += 1
            return True
        window.left += 1
        window.last = told
        return False

    def summaries(self, now_s: float) -> list[tuple[Told, int]]:
        """Of windows that are over: the last incident that wasn't told, and how many weren't."""
        found: list[tuple[Told, int]] = []
        for kind, window in list(self._windows.items()):
            if now_s - window.began_s < self._window_s:
                continue
            del self._windows[kind]
            if window.last is not None:
                # The summary counts in the next window: a storm that goes on is one a window.
                self._windows[kind] = _Window(now_s, told=self._burst)
                found.append((window.last, window.left))
        return found


class IncidentHook:
    """Tells a command of incidents."""

    def __init__(
        self,
        tail: EventTail,
        *,
        command: Sequence[str],
        timeout_s: float,
        limiter: Limiter,
        about: Mapping[str, str],
        meters: Meters = NO_METERS,
        poll_s: float = _POLL_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            tail: where incidents come from.
            command: program and arguments; no shell reads them.
            timeout_s: after which it is killed.
            limiter: of runs.
            about: what each run is told of this mount.
            meters: where runs are counted.
            poll_s: between looks for new incidents.
            now_s: seconds that never go back.
        """
        self._tail = tail
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._limiter = limiter
        self._about = dict(about)
        self._meters = meters
        self._poll_s = poll_s
        self._now_s = now_s
        self._stop = threading.Event()
        self._stopped_s = 0.0
        self._thread = threading.Thread(target=self._work, name="incidents", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def close(self) -> None:
        """Begin no more runs, wait a moment for those that have begun; the next start goes on."""
        self._stopped_s = self._now_s()
        self._stop.set()
        self._thread.join(2 * _END_S)

    def _work(self) -> None:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="incident") as pool:
            while not self._stop.is_set():
                try:
                    is_idle = not self._pass(pool)
                except Exception:  # noqa: BLE001 - the thread's outermost edge
                    _log.exception("incidents-failed")
                    is_idle = True
                if is_idle:
                    self._stop.wait(self._poll_s)

    def _pass(self, pool: ThreadPoolExecutor) -> bool:
        """Tell of some incidents and keep the place; False if there was none."""
        found = self._tail.next(_PARALLEL)
        now_s = self._now_s()
        due = [(told, 0) for told in found if self._is_due(told, now_s)]
        due += self._limiter.summaries(now_s)
        runs = [pool.submit(self._tell, told, left) for told, left in due]
        results = [run.result() for run in runs]
        if all(results):
            self._tail.keep()
        return bool(found)

    def _is_due(self, told: Told, now_s: float) -> bool:
        if incident_kind(told.event.kind).severity is Severity.NOTICE:
            return False
        if self._limiter.admit(told, now_s):
            return True
        self._meters.add(HOOK_RUNS, label="suppressed")
        return False

    def _tell(self, told: Told, suppressed: int) -> bool:
        """One run of the command; its failure is logged and counted, and stays its own.

        Returns:
            False if it was cut off by the daemon's end, and has to be told by the next start.
        """
        known = incident_kind(told.event.kind)
        document: dict[str, Any] = {
            "id": told.id,
            "at": told.event.at,
            "kind": told.event.kind,
            "severity": str(known.severity),
            "subject": told.event.subject,
            "detail": told.event.detail,
            "hint": known.hint,
            "suppressed": suppressed,
            **self._about,
        }
        try:
            code, errors = self._run(_encoded(document))
        except OSError as exc:
            self._failed(told, "failed", str(exc))
            return True
        if code is None and self._stop.is_set():
            return False
        if code is None:
            self._failed(told, "timeout", f"killed after {self._timeout_s:g} s")
        elif code:
            self._failed(told, "failed", f"exit code {code}: {errors}")
        else:
            self._meters.add(HOOK_RUNS, label="ok")
            _log.info("incident-told id=%s kind=%s", told.id, told.event.kind)
        return True

    def _is_cut_off(self) -> bool:
        """Whether the daemon ends, and the run has had its moment."""
        return self._stop.is_set() and self._now_s() - self._stopped_s > _END_S

    def _failed(self, told: Told, result: str, error: str) -> None:
        self._meters.add(HOOK_RUNS, label=result)
        _log.warning("incident-not-told id=%s kind=%s error=%s", told.id, told.event.kind, error)

    def _run(self, document: bytes) -> tuple[int | None, str]:
        """Exit code (None if it was killed) and the beginning of what it said to be wrong.

        Raises:
            OSError: it can't be started.
        """
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": _PATH, **environment},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        with process.stderr as errors:
            try:
                _give(process.stdin.fileno(), document)
                with contextlib.suppress(OSError):
                    process.stdin.close()
                said = self._follow(process, errors.fileno())
            finally:
                code = _end(process)
        return code, said

    def _follow(self, process: subprocess.Popen[bytes], errors: int) -> str:
        """Until it ends or its time is over; the beginning of its errors."""
        os.set_blocking(errors, False)
        kept = bytearray()
        deadline = self._now_s() + self._timeout_s
        ended = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                selector.register(errors, selectors.EVENT_READ)
                while (left_s := deadline - self._now_s()) > 0 and not self._is_cut_off():
                    ready = {key.fd for key, _ in selector.select(min(left_s, _LOOK_S))}
                    if errors in ready and not _take(errors, kept):
                        selector.unregister(errors)
                    if ended in ready:
                        _take(errors, kept)
                        break
        finally:
            os.close(ended)
        return kept.decode(errors="backslashreplace").strip()


def _encoded(document: Mapping[str, Any]) -> bytes:
    """One line; at most six bytes a character, so that a pipe holds the longest incident."""
    text = json.dumps(document, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"


def _give(fd: int, document: bytes) -> None:
    """Write what fits into the pipe, which is all: nobody has to read it."""
    assert len(document) <= _PIPE_BYTES, len(document)
    os.set_blocking(fd, False)
    with contextlib.suppress(OSError):
        os.write(fd, document)


def _take(fd: int, kept: bytearray) -> bool:
    """Read a piece, keep of it what there is room for; False at the end."""
    try:
        data = os.read(fd, _PIPE_BYTES)
    except BlockingIOError:
        return True
    except OSError:
        return False
    kept += data[: _ERRORS_KEPT - len(kept)]
    return bool(data)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None if it had to be killed, with all that it started in its session."""
    code = process.poll()
    if code is not None:
        return code
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
    return None
