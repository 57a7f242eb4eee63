"""The client's side of the socket: connections that are made again, and requests that are repeated.

Owns the rules: a request is sent until it is answered, as long as a daemon can be reached; what it
changes is done once all the same. A forked child has none of its parent's connections: it is a
client of its own. A daemon that can't see this process hears of it now and then while it has files
open. Any thread; a connection is one thread's at a time.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from ckptgate.errors import CkptError, UnusableError
from ckptgate_adapters.fsspec_ckpt import messages, wire

__all__ = ["Answered", "Client", "Held", "Introduction", "client_for", "open_clients"]

_AT_ONCE_MAX: Final = 32
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a client says of itself; None and "" are left to its process's environment."""

    rank: int | None = None
    world_size: int | None = None
    job: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply: its packets in order, and the descriptor that came along, the caller's; -1: none."""

    packets: tuple[messages.Told, ...]
    fd: int

    @property
    def told(self) -> messages.Told:
        """The last packet, of most replies the only one."""
        return self.packets[-1]


class Held(Protocol):
    """An open file of this client, as far as the connection must know it."""

    is_lost: bool


class Client:
    """One client of a daemon: the files and requests of a process under one introduction."""

    def __init__(
        self,
        reach: Callable[[bool, bool], str],
        introduction: Introduction,
        *,
        patience_s: float = 60.0,
    ) -> None:
        """Connect at the first request.

        Args:
            reach: gives the directory of a daemon's socket; told that nobody answers there, and
                that it may, it starts one.
            introduction: who this is.
            patience_s: how long a daemon that went away is looked for again.
        """
        self._reach = reach
        self._introduction = introduction
        self._patience_s = patience_s
        self._is_starting = True
        self._end_s = math.inf
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_AT_ONCE_MAX)
        self._session = secrets.token_hex(16)
        self._numbers = secrets.randbits(62)
        self._all: set[socket.socket] = set()
        self._idle: list[socket.socket] = []
        self._held: dict[int, weakref.ref[Held]] = {}
        self._epoch = ""
        self._ping_s = 0.0
        self._is_pinging = False

    def next_id(self) -> int:
        """A number for a change."""
        with self._lock:
            self._numbers = (self._numbers + 1) & ((1 << 63) - 1)
            return self._numbers

    def hold(self, fh: int, file: Held) -> None:
        """A file is open; it is told when the daemon has lost it."""
        with self._lock:
            self._held[fh] = weakref.ref(file)
            is_first = self._ping_s > 0 and not self._is_pinging
            self._is_pinging = self._is_pinging or is_first
        if is_first:
            threading.Thread(target=self._ping, name="ckpt-ping", daemon=True).start()

    def let_go(self, fh: int) -> None:
        """A file isn't open any more."""
        with self._lock:
            self._held.pop(fh, None)

    def call(
        self, request: messages.Request, *, is_long: bool = False, may_start: bool = True
    ) -> Answered:
        """Have a request answered.

        Args:
            request: what.
            is_long: it may take as long as it likes, without keeping others from being sent.
            may_start: where no daemon runs, one is started; a new one knows nothing of old files.

        Raises:
            OSError: it was not done: Python's own class where the errno has one.
            UnusableError: no daemon answers.
        """
        may_start = may_start and self._is_starting
        if is_long:
            return self._call(request, may_start)
        with self._room:
            return self._call(request, may_start)

    def start_no_daemon(self) -> None:
        """From now on a daemon that isn't there any more is an error at once."""
        self._is_starting = False

    def end_at(self, end_s: float) -> None:
        """From now on no call takes longer than until *end_s* of the monotonic clock."""
        self._end_s = end_s

    def close(self) -> None:
        """Hang up; files that are open are given up."""
        with self._lock:
            connections, self._all = self._all, set()
            self._idle.clear()
            self._ping_s = 0.0
        for connection in connections:
            connection.close()

    def after_fork(self) -> None:
        """In a forked child: begin anew, without the parent's connections."""
        for connection in list(self._all):
            connection.close()
        self._begin()

    def _ping(self) -> None:
        """Be known to the daemon, also to one that has just been started, while files are open."""
        while True:
            time.sleep(self._ping_s)
            with self._lock:
                if not (self._held and self._ping_s):
                    self._is_pinging = False
                    return
            # One that isn't there now may be at the next time; whoever uses a file is told more.
            with contextlib.suppress(OSError):
                self.call(messages.Ping(), may_start=False)

    def _call(self, request: messages.Request, may_start: bool) -> Answered:
        deadline = min(time.monotonic() + self._patience_s, self._end_s)
        while True:
            connection = self._take(deadline, may_start)
            try:
                connection.settimeout(self._time_left_s())
                reply = _exchange(connection, request)
            except (ConnectionError, msgspec.MsgspecError) as exc:
                self._drop(connection)
                if time.monotonic() > deadline:
                    raise _unreachable(exc) from exc
                # All others lead to the same dead process.
                self._drop_idle()
                if hasattr(request, "is_again"):
                    request = msgspec.structs.replace(request, is_again=True)
                continue
            except BaseException:
                # Its answer would be taken for the next request's.
                self._drop(connection)
                raise
            with self._lock:
                if connection in self._all:
                    self._idle.append(connection)
            if isinstance(reply, messages.Failed):
                raise wire.error_of(reply, getattr(request, "path", ""))
            return reply

    def _time_left_s(self) -> float | None:
        """None for ever; never 0, which would be another thing."""
        return None if self._end_s == math.inf else max(self._end_s - time.monotonic(), 0.001)

    def _take(self, deadline: float, may_start: bool) -> socket.socket:
        """A connection that nobody uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        is_needed = False
        while True:
            spool = self._reach(is_needed, may_start)
            try:
                return self._connect(spool)
            except (ConnectionError, FileNotFoundError, TimeoutError) as exc:
                if time.monotonic() > deadline:
                    raise _unreachable(exc) from exc
            if is_needed:
                time.sleep(_PAUSE_S)
            is_needed = True

    def _connect(self, spool: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(self._time_left_s())
            with wire.address(spool) as short:
                connection.connect(short)
            *before, last = self._hello()
            for hello in before:
                wire.send(connection, wire.encode(hello))
            reply = _exchange(connection, last)
            if isinstance(reply, messages.Failed):
                raise wire.error_of(reply, "")
            self._welcomed(connection, reply.told)
        except BaseException:
            # An interrupt, too, must not keep the socket: nobody else has it yet.
            connection.close()
            raise
        return connection

    def _hello(self) -> list[messages.Hello]:
        """The packets that say who this is, and what it has open."""
        with self._lock:
            held = tuple(self._held)
        each = messages.HELD_AT_ONCE
        hello = messages.Hello(
            version=messages.VERSION,
            session=self._session,
            rank=self._introduction.rank,
            world_size=self._introduction.world_size,
            job=self._introduction.job,
        )
        parts = [held[at : at + each] for at in range(0, len(held), each)] or [()]
        return [
            msgspec.structs.replace(hello, held=part, has_more=part is not parts[-1])
            for part in parts
        ]

    def _welcomed(self, connection: socket.socket, told: messages.Told) -> None:
        epoch = told.text
        with self._lock:
            self._ping_s = told.ping_s
            self._all.add(connection)
            if self._epoch not in {"", epoch}:
                for reference in self._held.values():
                    file = reference()
                    if file is not None:
                        file.is_lost = True
                self._held.clear()
            self._epoch = epoch

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)


def _exchange(connection: socket.socket, request: messages.Request) -> Answered | messages.Failed:
    """Send a request and receive its whole reply."""
    packets: list[messages.Told] = []
    fd = -1
    try:
        wire.send(connection, wire.encode(request))
        while True:
            data, got = wire.receive(connection, wire.REPLY_BYTES_MAX, takes_fd=True)
            if got >= 0:
                if fd >= 0:
                    os.close(fd)
                fd = got
            if not data:
                raise ConnectionResetError("the daemon hung up")
            reply = wire.decode_reply(data)
            if isinstance(reply, messages.Failed):
                break
            packets.append(reply)
            if not reply.has_more:
                return Answered(tuple(packets), fd)
    except BaseException:
        # An interrupt, too, must not keep the descriptor that came: nobody else has it yet.
        if fd >= 0:
            os.close(fd)
        raise
    if fd >= 0:
        os.close(fd)
    return reply


def _unreachable(exc: BaseException) -> CkptError:
    msg = f"the daemon does not answer: {exc}"
    return UnusableError(msg, hint="see ckptgate.log in its spool", errno_value=errno.EIO)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_shared: dict[Hashable, Client] = {}
_shared_lock = threading.Lock()


def client_for(key: Hashable, make: Callable[[], Client]) -> Client:
    """The client of this process with that key: equal file systems share one."""
    with _shared_lock:
        client = _shared.get(key)
        if client is None or client.pid != os.getpid():
            client = _shared[key] = make()
        return client


def open_clients() -> list[Client]:
    """All clients of this process."""
    return list(_shared.values())


def _begin_in_child() -> None:
    global _shared_lock  # noqa: PLW0603 - another thread of the parent may have had it
    _shared_lock = threading.Lock()
    for client in list(_clients):
        with contextlib.suppress(OSError):
            client.after_fork()
    _shared.clear()


os.register_at_fork(after_in_child=_begin_in_child)
