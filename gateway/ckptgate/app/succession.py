"""How a running mount passes from one supervisor to the next, while both are there.

The next one asks on `<spool>/supervisor.sock` and is given copies of the kernel session's device,
of the spool's lock, and of the connection to the keeper. From then on the old one only watches: the
next one's mount process ends the old mount process as soon as it could serve itself. When it
serves, the next one says `taken`, and the old one ends without unmounting. If the connection ends
before that, the next one is dead, and the old one goes on, with its children started again where
needed. If the old one dies, the next one has everything. So somebody always goes on.

Whoever asks must be of the same user. One at a time. One that takes too long, as it is stopped or
stuck, is killed: callers may be waiting for it. Thread rule: the supervisor's one thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ckptgate.app.config import Config
from ckptgate.app.keeping import Held
from ckptgate.errors import BusyError, CkptError, RefusedError, UnusableError
from ckptgate_adapters.channels import RemoteError, address_in, bind_in, error_reply

__all__ = [
    "HURRIED_S",
    "SUPERVISOR_SOCKET",
    "TAKEOVER_S",
    "Door",
    "Predecessor",
    "Successor",
    "check_same",
]

_log = logging.getLogger(__name__)

SUPERVISOR_SOCKET: Final = "supervisor.sock"
_PROTOCOL: Final = 1
_MESSAGE_BYTES_MAX: Final = 1 << 16
_REQUEST_S: Final = 2.0
_ANSWER_S: Final = 60.0
"""The old one may be starting a child again, and hears nobody meanwhile."""
TAKEOVER_S: Final = 120.0
"""The next one is there for so long without having taken the mount over."""
HURRIED_S: Final = 10.0
"""The same, where this one was told to end: whoever told it waits."""
_CREDENTIALS: Final = struct.Struct("3i")
_NONSENSE: Final = (msgspec.MsgspecError, RecursionError, ValueError)
"""How a message that is none of ours fails; one that is nested deeply enough, by the second."""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the next one asks with."""

    protocol: int
    mountpoint: str = ""
    store: str = ""
    spool: str = ""


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What it is told, beside the descriptors."""

    protocol: int = 0
    error: dict[str, str | int | None] | None = None


def check_same(running: Config, wanted: Config) -> None:
    """A mount that goes on is the same mount.

    Raises:
        RefusedError: store, spool or mount point differ.
    """
    for name in ("mountpoint", "store", "spool"):
        is_there, is_wanted = getattr(running, name), getattr(wanted, name)
        if is_there != is_wanted:
            msg = f"the mount {running.mountpoint} has the {name} {is_there}, not {is_wanted}"
            hint = f"ckptgate umount {running.mountpoint}, and mount anew"
            raise RefusedError(msg, subject=running.mountpoint, hint=hint)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class Successor:
    """The next supervisor, as the present one sees it."""

    def __init__(
        self, connection: socket.socket, pidfd: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch it.

        Args:
            connection: to it.
            pidfd: of it; belongs to this object.
            clock: seconds, monotonic.
        """
        self._connection = connection
        self._pidfd = pidfd
        self._clock = clock
        self._due_s = clock() + TAKEOVER_S
        self._is_hurried = False
        self._is_killed = False

    def fileno(self) -> int:
        """Readable when there is something to hear."""
        return self._connection.fileno()

    def hurry(self) -> None:
        """This process was told to end: whoever has the mount then is to end it, and soon."""
        if not self._is_hurried:
            self._is_hurried = True
            self._due_s = min(self._due_s, self._clock() + HURRIED_S)

    @property
    def is_hurried(self) -> bool:
        """Whether that was so."""
        return self._is_hurried

    @property
    def pause_s(self) -> float | None:
        """How long it still has; None: it is dead already, or will be at once."""
        return None if self._is_killed else max(0.0, self._due_s - self._clock())

    def kill_if_late(self) -> None:
        """Have it dead if its time is over; `fileno` becomes readable by that."""
        if not self._is_killed and self._clock() >= self._due_s:
            # From now on it isn't the supervisor, whatever it may just have said.
            self._is_killed = True
            _log.error("replacement-stuck hurried=%s: killing it", self._is_hurried)
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def end(self) -> bool:
        """Whether it is the supervisor now; else it is dead. Called once, when it is readable.

        One that is gets the signal that this process had meanwhile.
        """
        with self._connection:
            has_taken = not self._is_killed and self._last_word() == b"taken"
        if has_taken and self._is_hurried:
            self._signal(signal.SIGTERM)
        os.close(self._pidfd)
        return has_taken

    def _last_word(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._connection.recv(_MESSAGE_BYTES_MAX)
        return b""


class Door:
    """Where the next supervisor asks."""

    def __init__(self, spool: str) -> None:
        """Open it; raises OSError."""
        self._socket = bind_in(socket.SOCK_SEQPACKET, spool, SUPERVISOR_SOCKET)
        self._socket.listen(8)
        self._socket.settimeout(_REQUEST_S)

    def fileno(self) -> int:
        """Readable when somebody asks."""
        return self._socket.fileno()

    def let_in(self, give: Callable[[], Held], running: Config) -> Successor | None:
        """Answer who asks.

        Args:
            give: what it gets; raises CkptError if it gets nothing.
            running: of the mount.
        """
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return None
        try:
            successor = self._met(connection, give, running)
        except OSError as exc:
            _log.warning("replacement-failed error=%r", exc)
            successor = None
        if successor is None:
            connection.close()
        return successor

    def _met(
        self, connection: socket.socket, give: Callable[[], Held], running: Config
    ) -> Successor | None:
        """Who asks, once it has been given everything; None if it gets nothing.

        Raises:
            OSError: it went away, or says nothing.
        """
        pid, uid = _peer(connection)
        connection.settimeout(_REQUEST_S)
        try:
            held = _asked(connection.recv(_MESSAGE_BYTES_MAX), pid, uid, give, running)
        except CkptError as exc:
            connection.send(json.dumps({"error": error_reply(exc)}).encode())
            return None
        pidfd = os.pidfd_open(pid)
        try:
            fds = [held.device, held.lock, *([held.keeper.fileno()] if held.keeper else [])]
            socket.send_fds(connection, [b'{"protocol": %d}' % _PROTOCOL], fds)
        except OSError:
            os.close(pidfd)
            raise
        _log.info("being-replaced by=%d", pid)
        return Successor(connection, pidfd)

    def close(self) -> None:
        """Close it; the socket's file stays for the next one to bind."""
        self._socket.close()


def _asked(message: bytes, pid: int, uid: int, give: Callable[[], Held], running: Config) -> Held:
    """What somebody gets.

    Raises:
        CkptError: nothing.
    """
    try:
        # Not by msgspec alone: paths that aren't UTF-8 have halves of pairs in them.
        request = msgspec.convert(json.loads(message), _Request)
    except _NONSENSE:
        request = _Request(protocol=0)
    # A process of a namespace that this one can't see into has no number here.
    if uid not in {0, os.geteuid()} or request.protocol != _PROTOCOL or pid <= 0:
        msg = "the mount can be replaced by its own user, and by a release that knows how"
        raise RefusedError(msg, subject=running.mountpoint)
    wanted = Config(
        mountpoint=request.mountpoint, store=request.store, spool=request.spool, s3=running.s3
    )
    check_same(running, wanted)
    return give()


class Predecessor:
    """The present supervisor, as the next one sees it."""

    def __init__(self, config: Config) -> None:
        """Ask it.

        Raises:
            UnusableError: it doesn't answer.
            RemoteError: it refuses.
        """
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.settimeout(_ANSWER_S)
            with address_in(config.spool, SUPERVISOR_SOCKET) as address:
                self._connection.connect(address)
            request = {
                "protocol": _PROTOCOL,
                "mountpoint": config.mountpoint,
                "store": config.store,
                "spool": config.spool,
            }
            self._connection.send(json.dumps(request).encode())
            self.held = self._answer(config)
        except OSError as exc:
            self._connection.close()
            if isinstance(exc, CkptError):
                raise
            msg = f"the supervisor of {config.mountpoint} does not answer: {exc}"
            raise UnusableError(msg, subject=config.mountpoint, hint="see its log") from exc

    def _answer(self, config: Config) -> Held:
        data, fds, _, _ = socket.recv_fds(self._connection, _MESSAGE_BYTES_MAX, 3)
        try:
            self._check(data, len(fds), config)
        except CkptError:
            for fd in fds:
                os.close(fd)
            raise
        for fd in fds:
            os.set_inheritable(fd, False)
        keeper = socket.socket(fileno=fds[2]) if len(fds) > 2 else None
        return Held(device=fds[0], lock=fds[1], keeper=keeper)

    @staticmethod
    def _check(data: bytes, fds_count: int, config: Config) -> None:
        """Return if it gave everything.

        Raises:
            RemoteError: it refuses.
            BusyError: it said nothing.
            UnusableError: it said what makes no sense.
        """
        if not data:
            msg = f"the supervisor of {config.mountpoint} ended, or is being replaced already"
            raise BusyError(msg, subject=config.mountpoint, hint="ckptgate status")
        try:
            reply = msgspec.convert(json.loads(data), _Reply)
            if reply.error is not None:
                raise RemoteError.of(reply.error)
        except (*_NONSENSE, KeyError, TypeError) as exc:
            msg = f"the supervisor of {config.mountpoint} answers what makes no sense: {exc!r}"
            raise UnusableError(msg, subject=config.mountpoint, hint="see its log") from exc
        if fds_count < 2:
            msg = f"the supervisor of {config.mountpoint} gave {fds_count} descriptors, not 2"
            raise UnusableError(msg, subject=config.mountpoint, hint="see its log")

    def taken(self) -> None:
        """This process is the supervisor now."""
        with contextlib.suppress(OSError):
            self._connection.send(b"taken")
        self._connection.close()
