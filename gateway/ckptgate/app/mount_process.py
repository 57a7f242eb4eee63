"""The mount process: serves the kernel's requests from the name space.

On its first start it negotiates the session; after a death of its predecessor it continues the
predecessor's session from the state that was kept in the spool.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import threading
from contextlib import suppress
from typing import Final

from ckptgate.app.build import build_parts, build_vfs
from ckptgate.app.config import Config
from ckptgate.app.mountpoints import abort_session
from ckptgate.app.supervisor import SESSION_FILE
from ckptgate.errors import FullError
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.channels import MOUNT_SOCKET, DatagramReceiver
from ckptgate_adapters.fuse.server import FuseServer
from ckptgate_adapters.fuse.session import FuseSession

__all__ = ["run_mount"]

_log = logging.getLogger(__name__)
_GC_NEW_OBJECTS: Final = 50_000
_OPEN_FILES: Final = 1 << 20
_NICE: Final = -10
"""The mount's priority, where the system allows it: it does little, and callers wait for it."""


class _LateInvalidations:
    """Invalidations for the mount's own catalog: the server exists only after the vfs."""

    def __init__(self) -> None:
        self.server: FuseServer | None = None

    def name(self, parent: int, name: str) -> None:
        if self.server is not None:
            self.server.invalidate_name(parent, name)

    def node(self, ino: int) -> None:
        if self.server is not None:
            self.server.invalidate_node(ino)


def run_mount(config: Config, device: int, ready_fd: int) -> int:
    """Serve until the unmount; returns 0 then."""
    _raise_file_limit()
    _go_before_others()
    # Rows come and go by the hundred thousand in one listing and hold no cycles: looking through
    # all that lives each time would make every caller wait.
    gc.set_threshold(_GC_NEW_OBJECTS, 50, 100)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parts = build_parts(config, process="mount")
    try:
        parts.spool.reserve_space()
    except FullError as exc:
        _log.warning("spool-full error=%s", exc)
    invalidations = _LateInvalidations()
    fs = build_vfs(parts, invalidations)
    state_path = os.path.join(config.spool, SESSION_FILE)
    if os.path.exists(state_path):
        session = FuseSession.resume(device, state_path)
    else:
        session = FuseSession(device, state_path=state_path)
        parts.spool.clear_replies()
        parts.spool.clear_handles()
    fs.start_session(is_takeover=session.is_resumed)
    server = FuseServer(fs, session, passthrough=config.passthrough, meters=parts.meters)
    invalidations.server = server
    receiver = DatagramReceiver(config.spool, MOUNT_SOCKET)
    threading.Thread(target=_receive, args=(receiver, server, fs), daemon=True).start()

    parent = os.getppid()

    def on_term(number: int, frame: object) -> None:
        del number, frame
        if os.getppid() != parent:
            # The supervisor is dead: nobody would answer whoever waits for the mount.
            threading.Thread(target=abort_session, args=(config.mountpoint,), daemon=True).start()
        server.stop()

    signal.signal(signal.SIGTERM, on_term)
    # The kernel queues requests from the moment of mounting on, so serving may begin after this.
    _announce(ready_fd)
    server.serve()
    receiver.close()
    parts.spool.close()
    parts.store.close()
    return 0


def _announce(ready_fd: int) -> None:
    with suppress(OSError):
        os.write(ready_fd, b"r")
        os.close(ready_fd)


def _raise_file_limit() -> None:
    """Each open handle takes a descriptor; a trainer may hold many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _go_before_others() -> None:
    """Ask for a high priority; before any thread is started, as they inherit it.

    On a node whose CPUs are all busy, with digests or with training, a request would wait for the
    end of somebody's turn: several milliseconds, twice for each call.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _receive(receiver: DatagramReceiver, server: FuseServer, fs: Vfs) -> None:
    """Pass the publisher's invalidations on to the kernel."""
    while (data := receiver.wait(None)) is not None:
        message = json.loads(data)
        if "node" in message:
            server.invalidate_node(int(message["node"]))
            try:
                fs.node_replaced(int(message["node"]))
            except Exception:  # noqa: BLE001 - the thread's outermost edge
                _log.exception("replaced-node-kept node=%s", message["node"])
        else:
            server.invalidate_name(int(message["parent"]), str(message["name"]))
