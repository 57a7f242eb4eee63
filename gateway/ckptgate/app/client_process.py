"""The process that serves a spool to the clients of `ckpt://` where there is no mount.

It goes on with what a predecessor's clients have open, and ends when it is not needed any more.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Final

from ckptgate.app.build import build_parts, build_vfs, has_work, raise_file_limit
from ckptgate.app.children import only_one
from ckptgate.app.config import Config
from ckptgate.errors import FullError
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.channels import MOUNT_SOCKET, DatagramReceiver, read_invalidation
from ckptgate_adapters.fsspec_ckpt.identity import ClientIdentity
from ckptgate_adapters.fsspec_ckpt.serving import ClientServer
from ckptgate_adapters.proc_identity import ProcIdentity

__all__ = ["STOPPED", "run_clients"]

_log = logging.getLogger(__name__)

STOPPED: Final = 0
"""Exit code of an end in order."""
_GC_NEW_OBJECTS: Final = 50_000
_LOOK_S: Final = 2.0


class _NoKernel:
    """`ports.catalog.Invalidations` where no kernel knows anything."""

    def name(self, parent: int, name: str) -> None:
        """Nobody needs to know."""

    def node(self, ino: int) -> None:
        """Nobody needs to know."""


def run_clients(config: Config, ready_fd: int, idle_exit_s: float) -> int:
    """Serve until SIGTERM, or until nobody was connected and nothing left for *idle_exit_s*."""
    raise_file_limit()
    gc.set_threshold(_GC_NEW_OBJECTS, 50, 100)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()

    def on_term(number: int, frame: object) -> None:
        del number, frame
        stop.set()

    signal.signal(signal.SIGTERM, on_term)
    lock = only_one(config.spool, "mount")
    parts = build_parts(config, process="mount")
    try:
        parts.spool.reserve_space()
    except FullError as exc:
        _log.warning("spool-full error=%s", exc)
    identity = ClientIdentity(ProcIdentity())
    fs = build_vfs(parts, _NoKernel(), identity)
    fs.take_handles_over()
    fs.start_session(is_takeover=False)
    server = ClientServer(fs, config.spool, identity=identity)
    receiver = DatagramReceiver(config.spool, MOUNT_SOCKET)
    threading.Thread(target=_receive, args=(receiver, fs), daemon=True).start()
    server.start()
    with contextlib.suppress(OSError):
        os.write(ready_fd, b"r")
        os.close(ready_fd)
    _wait(stop, idle_exit_s, lambda: server.idle_s, lambda: has_work(parts.spool))
    server.close()
    receiver.close()
    parts.spool.close()
    parts.store.close()
    lock.release()
    return STOPPED


def _wait(
    stop: threading.Event,
    idle_exit_s: float,
    idle_s: Callable[[], float],
    is_working: Callable[[], bool],
) -> None:
    if not idle_exit_s:
        stop.wait()
        return
    while not stop.wait(min(_LOOK_S, idle_exit_s)):
        if idle_s() >= idle_exit_s and not is_working():
            return


def _receive(receiver: DatagramReceiver, fs: Vfs) -> None:
    """Drop what the publisher replaced, once nobody uses it."""
    while (data := receiver.wait(None)) is not None:
        message = read_invalidation(data)
        if message is None or message.node is None:
            continue
        try:
            fs.node_replaced(message.node)
        except Exception:  # noqa: BLE001 - the thread's outermost edge
            _log.exception("replaced-node-kept node=%s", message.node)
