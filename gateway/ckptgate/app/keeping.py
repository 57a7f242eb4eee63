"""Who keeps a mount's descriptors while its supervisor is dead: systemd, a process, or nobody.

Under a service manager its descriptor store does, and the manager starts the next supervisor. A
mount in the background has a keeper (`keeper`), which does the same. In the foreground, without a
manager, nobody does: who started it can't be given anything, and the session ends with it.

Thread rule: the supervisor's one thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Final, Protocol

from ckptgate.app import keeper
from ckptgate.app.config import SESSION_FILE, Config
from ckptgate.errors import UnusableError
from ckptgate_adapters.fuse.channel import connection_of
from ckptgate_adapters.fuse.session import FuseSession
from ckptgate_adapters.sqlite_spool import SpoolLock, SqliteSpool
from ckptgate_adapters.systemd import received_fds
from ckptgate_adapters.systemd.stored import barrier, store_fd, unstore_fd

__all__ = [
    "Held",
    "KeeperProcess",
    "Keeping",
    "Nobody",
    "ServiceManager",
    "check_readable",
    "held_by_manager",
]

_log = logging.getLogger(__name__)

_DEVICE: Final = "ckptgate-device"
_LOCK: Final = "ckptgate-lock"
_CONNECTIONS: Final = "/sys/fs/fuse/connections"
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a supervisor has of the one before it.

    Attributes:
        device: descriptor of the kernel session.
        lock: descriptor that holds the spool's lock.
        keeper: the connection to the keeper, if there is one.
    """

    device: int
    lock: int
    keeper: socket.socket | None = None


def check_readable(spool: str) -> None:
    """Whether this release can go on with the session and the spool that another one left.

    Raises:
        FormatVersionError: it can't: they are of another version.
        UnusableError: they can't be read.
    """
    FuseSession.resume(-1, os.path.join(spool, SESSION_FILE))
    SqliteSpool.attach(spool).close()


class Keeping(Protocol):
    """Whoever keeps the descriptors."""

    is_kept: bool
    """Whether anybody does."""

    def begin(self, device: int, lock: int) -> None:
        """This process is the supervisor, and these are to be kept. May be repeated."""

    def end(self) -> None:
        """The mount is over."""

    def connection(self) -> socket.socket | None:
        """Ends when the keeper dies; a successor gets it. None where nothing has to be watched."""


class Nobody:
    """Nothing is kept."""

    is_kept = False

    def begin(self, device: int, lock: int) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""

    def connection(self) -> socket.socket | None:
        """None."""
        return None


class ServiceManager:
    """systemd keeps them."""

    is_kept = True

    def begin(self, device: int, lock: int) -> None:
        """Store both. Without them a restart is what it is without a manager: the session ends."""
        if not (store_fd(_DEVICE, device) and store_fd(_LOCK, lock) and barrier()):
            _log.warning("descriptors-not-stored hint='FileDescriptorStoreMax=16 in the unit'")

    def end(self) -> None:
        """Have them closed."""
        _forget_stored()

    def connection(self) -> socket.socket | None:
        """None: it doesn't die."""
        return None


def _forget_stored() -> None:
    unstore_fd(_DEVICE)
    unstore_fd(_LOCK)
    barrier()


def held_by_manager(config: Config) -> Held | None:
    """What the service manager kept of this service's mount; None where a new one must begin.

    Raises:
        UnusableError: it is of another spool.
        FormatVersionError: it is of a release that this one can't go on from. Whoever serves it
            still does so for a while.
    """
    stored = received_fds()
    devices, locks = stored.get(_DEVICE, []), stored.get(_LOCK, [])
    for fd in [fd for name, fds in stored.items() if name not in {_DEVICE, _LOCK} for fd in fds]:
        os.close(fd)
    if len(devices) == 1 and len(locks) == 1 and _is_alive(devices[0]):
        _check_spool(config, locks[0])
        check_readable(config.spool)
        return Held(device=devices[0], lock=locks[0])
    for fd in [*devices, *locks]:
        os.close(fd)
    if devices or locks:
        _log.warning("session-over: what was kept of it is dropped")
        _forget_stored()
    return None


def _is_alive(device: int) -> bool:
    """Whether the session goes on."""
    poll = select.poll()
    poll.register(device, 0)
    return not poll.poll(0)


def _check_spool(config: Config, lock: int) -> None:
    probe = SpoolLock(config.spool)
    try:
        probe.adopt(os.dup(lock))
    except UnusableError as exc:
        msg = f"the mount that is to go on has another spool than {config.spool}"
        hint = "systemctl stop it, and start it again: a restart keeps store, spool and mount point"
        raise UnusableError(msg, subject=config.spool, hint=hint) from exc
    probe.leave()


class KeeperProcess:
    """A process of its own keeps them, and starts the next supervisor."""

    is_kept = True

    def __init__(self, config: Config, connection: socket.socket | None = None) -> None:
        """Start nothing yet.

        Args:
            config: of the mount.
            connection: to the keeper that there is.
        """
        self._config = config
        self._connection = connection
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, device: int, lock: int) -> None:
        """Start it, or tell the one that there is what to start now."""
        if self._connection is not None:
            try:
                self._connection.send(self._message())
            except OSError:
                self._connection.close()
                self._connection = None
                self._reap()
            else:
                return
        try:
            ours = self._start()
            socket.send_fds(ours, [self._message()], [device, lock])
        except OSError as exc:
            # The mount is worth more than its keeper.
            _log.error("keeper-not-started error=%s", exc)
        else:
            self._connection = ours

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours

    def _message(self) -> bytes:
        number = connection_of(self._config.mountpoint)
        command = [sys.executable, "-P", "-m", "ckptgate.app.resume", self._config.spool]
        message = {"command": command, "abort": f"{_CONNECTIONS}/{number}/abort"}
        return json.dumps(message).encode()

    def end(self) -> None:
        """Have it end."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(b'{"end": true}')
            self._connection.close()
            self._connection = None
        self._reap()

    def _reap(self) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)

    def connection(self) -> socket.socket | None:
        """The connection to it."""
        return self._connection
