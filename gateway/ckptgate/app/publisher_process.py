"""The publisher process: runs the engine's loop and answers the command line."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import Final

from ckptgate.app.build import Parts, build_parts, build_publisher
from ckptgate.app.config import Config
from ckptgate.app.control import Control
from ckptgate.app.left import write_left
from ckptgate.app.seeing import Seeing
from ckptgate.app.status_pages import incident_hook, serve_status
from ckptgate.engine.digest import start_workers
from ckptgate.engine.publisher import Publisher
from ckptgate_adapters.channels import (
    PUBLISHER_SOCKET,
    ControlServer,
    DatagramInvalidations,
    DatagramReceiver,
)

__all__ = ["run_publisher"]

_log = logging.getLogger(__name__)

_DRAIN_STEP_S: Final = 0.05


def run_publisher(config: Config) -> int:
    """Serve until SIGTERM, then finish what can be finished within the drain time."""
    # A lease that is broken while it is only being tested must not end the process.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    start_workers()
    stop = threading.Event()
    parts = build_parts(config, process="publisher")
    publisher = build_publisher(parts, DatagramInvalidations(config.spool))
    receiver = DatagramReceiver(config.spool, PUBLISHER_SOCKET)

    def wait(timeout_s: float) -> None:
        if receiver.wait(timeout_s) is not None:
            receiver.drain()

    def on_term(*_: object) -> None:
        stop.set()
        control.wake()

    seeing = Seeing(parts, publisher.progress)
    control = Control(parts, publisher, seeing)
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ControlServer(config.spool, control.answer)
    server.start()
    pages = serve_status(config, seeing)
    hook = incident_hook(parts)
    try:
        publisher.run(stop, wait)
        _drain(parts, publisher, control)
    finally:
        hook.close()
        pages.close()
        server.close()
        receiver.close()
        parts.spool.close()
        parts.store.close()
    return 0


def _drain(parts: Parts, publisher: Publisher, control: Control) -> None:
    """Step until nothing is left, nothing moves any more, or the time is up; write what is left."""
    deadline = time.monotonic() + control.drain_timeout_s
    while control.is_left() and time.monotonic() < deadline:
        if not publisher.step() and not control.is_decidable():
            break
        time.sleep(_DRAIN_STEP_S)
    write_left(parts.config.spool, control.left())
