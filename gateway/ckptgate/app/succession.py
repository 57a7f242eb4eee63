"""How a running mount passes from one supervisor to the next, while both are there.

The next one asks on `<spool>/supervisor.sock` and is given copies of the kernel session's device,
of the spool's lock, and of the connection to the keeper. From then on the old one only watches: the
next one's mount process ends the old mount process as soon as it could serve itself. When it
serves, the next one says `taken`, and the old one ends without unmounting. If the connection ends
before that, the next one is dead, and the old one goes on, with its children started again where
needed. If the old one dies, the next one has everything. So somebody always goes on.

Whoever asks must be of the same user. One at a time. Thread rule: the supervisor's one thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from ckptgate.app.config import Config
from ckptgate.app.keeping import Held
from ckptgate.errors import BusyError, CkptError, RefusedError, UnusableError
from ckptgate_adapters.channels import RemoteError, address_in, bind_in, error_reply

__all__ = ["SUPERVISOR_SOCKET", "Door", "Predecessor", "Successor", "check_same"]

_log = logging.getLogger(__name__)

SUPERVISOR_SOCKET: Final = "supervisor.sock"
_PROTOCOL: Final = 1
_MESSAGE_BYTES_MAX: Final = 1 << 16
_REQUEST_S: Final = 2.0
_ANSWER_S: Final = 60.0
"""The old one may be starting a child again, and hears nobody meanwhile."""
_CREDENTIALS: Final = struct.Struct("3i")


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

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = _peer(connection)[0]

    def stop(self) -> None:
        """Pass a SIGTERM on to it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def fileno(self) -> int:
        """Readable when there is something to hear."""
        return self._connection.fileno()

    def has_taken(self) -> bool:
        """Whether it is the supervisor now; else it is dead. Called when it is readable."""
        with self._connection, contextlib.suppress(OSError):
            return self._connection.recv(_MESSAGE_BYTES_MAX) == b"taken"
        return False


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
            connection.settimeout(_REQUEST_S)
            held = self._asked(connection, give, running)
            if held is None:
                connection.close()
                return None
            fds = [held.device, held.lock, *([held.keeper.fileno()] if held.keeper else [])]
            socket.send_fds(connection, [b'{"protocol": %d}' % _PROTOCOL], fds)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            _log.warning("replacement-failed error=%r", exc)
            connection.close()
            return None
        return Successor(connection)

    def _asked(
        self, connection: socket.socket, give: Callable[[], Held], running: Config
    ) -> Held | None:
        pid, uid = _peer(connection)
        request: dict[str, Any] = json.loads(connection.recv(_MESSAGE_BYTES_MAX))
        try:
            if uid not in {0, os.geteuid()} or request["protocol"] != _PROTOCOL:
                msg = "the mount can be replaced by its own user, and by a release that knows how"
                raise RefusedError(msg, subject=running.mountpoint)
            check_same(running, _like(running, request))
            held = give()
        except CkptError as exc:
            connection.send(json.dumps({"error": error_reply(exc)}).encode())
            return None
        _log.info("being-replaced by=%d", pid)
        return held

    def close(self) -> None:
        """Close it; the socket's file stays for the next one to bind."""
        self._socket.close()


def _like(running: Config, request: dict[str, Any]) -> Config:
    return Config(
        mountpoint=str(request["mountpoint"]),
        store=str(request["store"]),
        spool=str(request["spool"]),
        s3=running.s3,
    )


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
        if not data:
            msg = f"the supervisor of {config.mountpoint} ended, or is being replaced already"
            raise BusyError(msg, subject=config.mountpoint, hint="ckptgate status")
        reply: dict[str, Any] = json.loads(data)
        if "error" in reply:
            raise RemoteError.of(reply["error"])
        for fd in fds:
            os.set_inheritable(fd, False)
        keeper = socket.socket(fileno=fds[2]) if len(fds) > 2 else None
        return Held(device=fds[0], lock=fds[1], keeper=keeper)

    def taken(self) -> None:
        """This process is the supervisor now."""
        with contextlib.suppress(OSError):
            self._connection.send(b"taken")
        self._connection.close()
