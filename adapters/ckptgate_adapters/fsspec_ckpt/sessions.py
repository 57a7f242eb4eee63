"""Clients and the files that they have open.

Owns the rule what the end of a client means: a session that ends with a file open is a writer that
died. It ends with its process; one whose process can't be looked at ends when it isn't connected,
so it is asked to be heard of in time. Any thread.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptgate.vfs.identify import Identify
from ckptgate.vfs.interface import ClientFileSystem, Opened
from ckptgate_adapters.fsspec_ckpt.journal import Journal, Owner

__all__ = ["FILES_MAX", "PING_S", "ClientFile", "Session", "Sessions"]

_log = logging.getLogger(__name__)

FILES_MAX: Final = 65536
"""So many files one client may have open."""
_LOOK_S: Final = 1.0
_UNKNOWN_PROCESS_S: Final = 60.0
"""So long a process that can't be looked at may take to come back to its files."""
PING_S: Final = 20.0
"""So often such a one is to be heard of, as it may not know that there is a new daemon."""
_UNSURE_S: Final = 60.0
"""So long a client may take to ask again for a file whose open it wasn't told of."""


@dataclass(slots=True, kw_only=True)
class ClientFile:
    """An open file of a client."""

    fh: int
    ino: int
    fd: int
    is_writer: bool
    is_complete: bool


@dataclass(slots=True)
class Session:
    """One client: a process, or one of several file systems in it.

    Attributes:
        owner: whose it is.
        files: what it has open.
        lost: handles that it had open, of which nothing is left.
        connections: it has.
        unsure: handle -> when the connection ended by which its client was last told of it.
        left_s: when its last connection ended.
        held: numbers of directories that it wants to be known whatever becomes of their names.
    """

    owner: Owner
    files: dict[int, ClientFile] = field(default_factory=dict[int, ClientFile])
    lost: set[int] = field(default_factory=set[int])
    connections: set[socket.socket] = field(default_factory=set[socket.socket])
    unsure: dict[int, float] = field(default_factory=dict[int, float])
    left_s: float = 0.0
    held: list[int] = field(default_factory=list[int])


class Sessions:
    """All clients of a daemon."""

    def __init__(self, fs: ClientFileSystem, journal: Journal, processes: Identify) -> None:
        self._fs = fs
        self._journal = journal
        self._processes = processes
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._orphans = journal.owners()
        self._began = time.monotonic()
        self._wanted = threading.Event()
        self._idle_since = time.monotonic()
        self._is_closed = False
        if self._orphans:
            self._wanted.set()

    @property
    def idle_s(self) -> float:
        """How long nobody is connected and no file is open; 0 while somebody is."""
        with self._lock:
            is_busy = bool(self._sessions or self._orphans)
            return 0.0 if is_busy else time.monotonic() - self._idle_since

    @property
    def has_files(self) -> bool:
        """Whether any client has a file open, also one that a predecessor opened."""
        with self._lock:
            return bool(self._orphans) or any(s.files for s in self._sessions.values())

    def join(self, owner: Owner, connection: socket.socket, held: tuple[int, ...]) -> Session:
        """A connection of a client; *held*: what it has open since before this process began.

        Raises:
            PermissionError: the session is another process's.
        """
        with self._lock:
            session = self._sessions.get(owner.session)
            if session is None:
                session = self._sessions[owner.session] = Session(owner)
            elif (session.owner.pid, session.owner.start) != (owner.pid, owner.start):
                msg = "the session belongs to another process"
                raise PermissionError(msg)
            session.connections.add(connection)
            session.left_s = 0.0
            mine = [fh for fh in dict.fromkeys(held) if self._orphans.get(fh) == owner]
            # With the lock: what another connection of this client asks of them waits for that.
            for fh in mine:
                del self._orphans[fh]
                self._take_over(session, fh)
        self._wanted.set()
        return session

    def leave(self, session: Session, connection: socket.socket, unsure: int) -> None:
        """A connection is gone.

        Args:
            session: whose.
            connection: it.
            unsure: a file that was opened by its last request, which its client may not know; or 0.
        """
        with self._lock:
            session.connections.discard(connection)
            if unsure in session.files:
                session.unsure[unsure] = time.monotonic()
            if session.connections or self._sessions.get(session.owner.session) is not session:
                return
            session.left_s = time.monotonic()
            if self._is_closed or (self._has_anything(session) and self._is_there(session)):
                return
            # With the same lock: it might come back, and must not be ended after that.
            left = self._taken_out(session)
        self._ended(session, left)

    def _has_anything(self, session: Session) -> bool:
        owner = session.owner
        return bool(session.files or session.held) or owner in self._orphans.values()

    def _is_there(self, session: Session) -> bool:
        """Whether the client lives, or may."""
        if session.owner.pid:
            return self._is_alive(session.owner)
        is_late = time.monotonic() - session.left_s > _UNKNOWN_PROCESS_S
        return bool(session.connections) or not is_late

    def _end(self, session: Session) -> None:
        """The client is gone: what it has open was written by one that died."""
        with self._lock:
            if self._sessions.get(session.owner.session) is not session:
                return
            left = self._taken_out(session)
        self._ended(session, left)

    def _taken_out(self, session: Session) -> list[int]:
        """Have a session be none any more; gives what it never asked for again. Has the lock."""
        del self._sessions[session.owner.session]
        # Opened by its predecessor, and never asked for again.
        left = [fh for fh, owner in self._orphans.items() if owner == session.owner]
        for fh in left:
            del self._orphans[fh]
        self._idle_since = time.monotonic()
        return left

    def _ended(self, session: Session, left: list[int]) -> None:
        for file in list(session.files.values()):
            self._give_up(file.fh, is_writer=file.is_writer)
        for fh in left:
            self._give_up_orphan(fh)
        self._fs.forget([(number, 1) for number in session.held])

    def watch(self, is_stopping: Callable[[], bool]) -> None:
        """Look after processes that die without the end of their connections; a thread's work."""
        while not is_stopping():
            if not self._wanted.wait(60):
                continue
            with self._lock:
                sessions = list(self._sessions.values())
                orphans = dict(self._orphans)
                if not sessions and not orphans:
                    self._wanted.clear()
                    continue
            for session in sessions:
                self._look_at(session)
            for fh, owner in orphans.items():
                self._look_at_orphan(fh, owner)
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End all connections; what is open stays so, for a successor."""
        with self._lock:
            self._is_closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            self._cut(session)

    def _look_at(self, session: Session) -> None:
        if not self._is_there(session):
            self._cut(session)
            self._end(session)
            return
        now = time.monotonic()
        for fh, at in list(session.unsure.items()):
            if now - at > _UNSURE_S and session.unsure.pop(fh, None) is not None:
                file = session.files.pop(fh, None)
                if file is not None:
                    self._give_up(fh, is_writer=file.is_writer)

    def _cut(self, session: Session) -> None:
        with self._lock:
            connections = list(session.connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _is_alive(self, owner: Owner) -> bool:
        return self._processes.is_alive(owner.pid, owner.start)

    def _take_over(self, session: Session, fh: int) -> None:
        """Go on with a handle that a predecessor opened for this client."""
        opened = self._reopened(fh)
        if opened is None:
            session.lost.add(fh)
            self._journal.drop(fh)
            return
        session.files[fh] = ClientFile(
            fh=fh,
            ino=0,
            fd=opened.fd,
            is_writer=self._journal.is_writer(fh),
            is_complete=opened.is_complete,
        )

    def _reopened(self, fh: int) -> Opened | None:
        try:
            return self._fs.reopen(fh)
        except OSError as exc:
            _log.warning("handle-lost fh=%d error=%s", fh, exc)
            return None

    def _look_at_orphan(self, fh: int, owner: Owner) -> None:
        if owner.pid:
            is_dead = not self._is_alive(owner)
        else:
            is_dead = time.monotonic() - self._began > _UNKNOWN_PROCESS_S
        if not is_dead:
            return
        with self._lock:
            if self._orphans.pop(fh, None) is None:
                return
            self._idle_since = time.monotonic()
        self._give_up_orphan(fh)

    def _give_up_orphan(self, fh: int) -> None:
        if self._reopened(fh) is None:
            self._journal.drop(fh)
        else:
            self._give_up(fh, is_writer=self._journal.is_writer(fh))

    def _give_up(self, fh: int, *, is_writer: bool) -> None:
        try:
            if is_writer:
                self._fs.give_up(fh, is_removed=False)
            else:
                self._fs.release(fh)
            self._journal.drop(fh)
        except Exception:  # noqa: BLE001 - one handle must not keep the others
            _log.exception("handle-kept fh=%d", fh)
