"""The publisher process: runs the engine's loop and answers the command line."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from ckptgate.app.build import Parts, build_parts, build_publisher
from ckptgate.app.children import ORPHAN_S, ORPHANED, SUCCEED, only_one
from ckptgate.app.config import Config
from ckptgate.app.control import Control
from ckptgate.app.left import write_left
from ckptgate.app.seeing import Seeing
from ckptgate.app.status_pages import incident_hook, serve_status
from ckptgate.app.stores import open_store
from ckptgate.engine.digest import start_workers
from ckptgate.engine.publisher import Publisher
from ckptgate_adapters.channels import (
    PUBLISHER_SOCKET,
    ControlServer,
    DatagramInvalidations,
    DatagramReceiver,
    DatagramWaker,
)

__all__ = ["run_publisher"]

_log = logging.getLogger(__name__)

_DRAIN_STEP_S: Final = 0.05
_PATIENCE_S: Final = 0.3
"""With a predecessor's step, which may be the upload of a large file: that is begun anew then."""


class _Ending:
    """Why and when it ends; handles its signals."""

    def __init__(self, *, is_kept: bool) -> None:
        self.stop = threading.Event()
        self.is_succeeded = threading.Event()
        self.wake: Callable[[], None] = lambda: None
        self._is_kept = is_kept
        self._parent = os.getppid()
        for number in (signal.SIGTERM, SUCCEED, ORPHANED):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        del frame
        is_told = number == signal.SIGTERM or self.stop.is_set()
        if number == ORPHANED and self._is_kept and not is_told:
            _log.warning("supervisor-died: publishing without one for_s=%g", ORPHAN_S)
            timer = threading.Timer(ORPHAN_S, self._leave)
            timer.daemon = True
            timer.start()
        elif number == signal.SIGTERM and os.getppid() == self._parent:
            self._end()
        else:
            self._leave()

    def _leave(self) -> None:
        """End at once: what is left, another one does."""
        self.is_succeeded.set()
        self._end()

    def _end(self) -> None:
        self.stop.set()
        self.wake()


def run_publisher(config: Config, *, is_kept: bool) -> int:
    """Serve until SIGTERM, then finish what can be finished within the drain time.

    For a successor it ends after the step that it is at. Without a supervisor it goes on for a
    while if somebody keeps the session: who makes something that other nodes must know of waits
    for the publisher.
    """
    # A lease that is broken while it is only being tested must not end the process.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    start_workers()
    ending = _Ending(is_kept=is_kept)
    store = open_store(config.store, config.s3)
    lock = only_one(config.spool, "publisher", patience_s=_PATIENCE_S)
    parts = build_parts(config, process="publisher", store=store)
    publisher = build_publisher(
        parts, DatagramInvalidations(config.spool), DatagramWaker(config.spool).wake
    )
    receiver = DatagramReceiver(config.spool, PUBLISHER_SOCKET)

    def wait(timeout_s: float) -> None:
        if receiver.wait(timeout_s) is not None:
            receiver.drain()

    seeing = Seeing(parts, publisher.progress, publisher.contact)
    control = Control(parts, publisher, seeing)
    ending.wake = control.wake
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ControlServer(config.spool, control.answer)
    server.start()
    pages = serve_status(config, seeing)
    hook = incident_hook(parts)
    try:
        publisher.run(ending.stop, wait)
        if not ending.is_succeeded.is_set():
            _drain(parts, publisher, control, ending.is_succeeded)
        if ending.is_succeeded.is_set():
            # What is in the spool is there, as after a kill; and a successor waits for this end.
            logging.shutdown()
            os._exit(0)
    finally:
        hook.close()
        pages.close()
        server.close()
        receiver.close()
        parts.spool.close()
        parts.store.close()
        lock.release()
    return 0


def _drain(
    parts: Parts, publisher: Publisher, control: Control, is_succeeded: threading.Event
) -> None:
    """Step until nothing is left, nothing moves any more, or the time is up; write what is left."""
    deadline = time.monotonic() + control.drain_timeout_s
    if control.is_left():
        control.begin_end()
    while control.is_left() and time.monotonic() < deadline and not is_succeeded.is_set():
        if not publisher.step() and not control.is_decidable():
            break
        time.sleep(_DRAIN_STEP_S)
    write_left(parts.config.spool, control.left())
