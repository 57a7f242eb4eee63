"""The mount process: serves the kernel's requests from the name space.

On its first start it negotiates the session; after a death of its predecessor, or in the place of
one that still serves, it continues the session from the state that was kept in the spool.

Without a supervisor it goes on serving for a while if somebody keeps the session (`is_kept`), so
that callers don't wait until there is a new one, whose own mount process then takes its place.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Final

from ckptgate.app.build import Parts, build_parts, build_vfs, raise_file_limit
from ckptgate.app.children import ORPHAN_S, ORPHANED, SUCCEED, only_one
from ckptgate.app.config import SESSION_FILE, Config
from ckptgate.app.mountpoints import abort_session
from ckptgate.app.stores import open_store
from ckptgate.errors import FullError, UnusableError
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.channels import MOUNT_SOCKET, DatagramReceiver, read_invalidation
from ckptgate_adapters.fsspec_ckpt.identity import ClientIdentity
from ckptgate_adapters.fsspec_ckpt.serving import ClientServer
from ckptgate_adapters.fuse.server import FuseServer
from ckptgate_adapters.fuse.session import FuseSession
from ckptgate_adapters.proc_identity import ProcIdentity

__all__ = ["run_mount"]

_log = logging.getLogger(__name__)
_GC_NEW_OBJECTS: Final = 50_000
_LEFT: Final = 75
"""Exit code of one that ended for a successor: the session goes on."""
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


def run_mount(config: Config, device: int, ready_fd: int, *, is_kept: bool) -> int:
    """Serve until the unmount; returns 0 then, and another code where the session goes on."""
    _set_process_up()
    store = open_store(config.store, config.s3)
    lock = only_one(config.spool, "mount")
    parts = build_parts(config, process="mount", store=store)
    invalidations = _LateInvalidations()
    identity = ClientIdentity(ProcIdentity())
    fs = build_vfs(parts, invalidations, identity)
    state_path = os.path.join(config.spool, SESSION_FILE)
    if os.path.exists(state_path):
        session = FuseSession.resume(device, state_path)
    else:
        _reserve_space(parts)
        session = FuseSession(device, state_path=state_path)
        parts.spool.clear_replies()
        parts.spool.clear_handles()
    fs.start_session(is_takeover=session.is_resumed)
    server = FuseServer(fs, session, passthrough=config.passthrough, meters=parts.meters)
    invalidations.server = server
    clients = ClientServer(fs, config.spool, identity=identity, invalidations=invalidations)
    receiver = DatagramReceiver(config.spool, MOUNT_SOCKET)
    threading.Thread(target=_receive, args=(receiver, server, fs), daemon=True).start()
    ending = _Ending(server, config.mountpoint, is_kept=is_kept)
    # The kernel queues requests from the moment of mounting on, so serving may begin after this.
    clients.start()
    _announce(ready_fd)
    try:
        is_settled = server.serve()
    except UnusableError as exc:
        _log.error("session-lost error=%s hint=%r", exc, exc.hint)
        abort_session(config.mountpoint)
        return 0
    _serve_clients_on(clients, invalidations, ending)
    if ending.code or not is_settled:
        # What is in the spool is there, as after a kill; and a successor waits for this end.
        logging.shutdown()
        os._exit(ending.code)
    clients.close()
    receiver.close()
    parts.spool.close()
    parts.store.close()
    lock.release()
    return 0


class _Ending:
    """How the process ends before its session does; handles its signals."""

    def __init__(self, server: FuseServer, mountpoint: str, *, is_kept: bool) -> None:
        self._server = server
        self._mountpoint = mountpoint
        self._is_kept = is_kept
        self._parent = os.getppid()
        self._is_alone = False
        self._is_told = False
        self.code = 0
        """Of an end before the session's."""
        signal.signal(SUCCEED, self._on_successor)
        signal.signal(ORPHANED, self._on_orphaned)
        signal.signal(signal.SIGTERM, self._on_term)

    @property
    def is_due(self) -> bool:
        """Whether the process is to end, whoever uses it."""
        return bool(self.code) or self._is_alone

    def _on_successor(self, number: int, frame: object) -> None:
        """Another process takes its place: end at once, without the session."""
        del number, frame
        self.code = _LEFT
        self._server.stop()

    def _on_term(self, number: int, frame: object) -> None:
        """Somebody ends all processes. Under a supervisor the unmount is what ends this one."""
        self._is_told = True
        if os.getppid() != self._parent:
            self._on_orphaned(number, frame)

    def _on_orphaned(self, number: int, frame: object) -> None:
        """The supervisor has died."""
        if self._is_told and self._is_kept:
            # Whoever ends all, and keeps the session, waits for this.
            self._on_successor(number, frame)
        elif not self._is_alone:
            self._is_alone = True
            threading.Thread(target=self._serve_alone, daemon=True).start()

    def _serve_alone(self) -> None:
        if self._is_kept:
            _log.warning("supervisor-died: serving without one for_s=%g", ORPHAN_S)
            time.sleep(ORPHAN_S)
            # Then the session ends, so that nobody waits for ever.
            _log.error("session-ends reason='no supervisor has taken it over'")
        # Nobody would answer whoever waits for the mount.
        abort_session(self._mountpoint)
        self._server.stop()


def _serve_clients_on(
    clients: ClientServer, invalidations: _LateInvalidations, ending: _Ending
) -> None:
    """The session is over, with its files: clients are to close theirs, too."""
    invalidations.server = None
    clients.wait_unused(lambda: ending.is_due)


def _set_process_up() -> None:
    raise_file_limit()
    _go_before_others()
    # Rows come and go by the hundred thousand in one listing and hold no cycles: looking through
    # all that lives each time would make every caller wait.
    gc.set_threshold(_GC_NEW_OBJECTS, 50, 100)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _reserve_space(parts: Parts) -> None:
    """Have room for changes on a full disk; nobody waits for this yet."""
    try:
        parts.spool.reserve_space()
    except FullError as exc:
        _log.warning("spool-full error=%s", exc)


def _announce(ready_fd: int) -> None:
    with suppress(OSError):
        os.write(ready_fd, b"r")
        os.close(ready_fd)


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
        message = read_invalidation(data)
        if message is None:
            continue
        if message.node is None:
            server.invalidate_name(message.parent or 0, message.name)
            continue
        server.invalidate_node(message.node)
        try:
            fs.node_replaced(message.node)
        except Exception:  # noqa: BLE001 - the thread's outermost edge
            _log.exception("replaced-node-kept node=%s", message.node)
