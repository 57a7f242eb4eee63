"""What all calls of `CkptFileSystem` need: its options, who asks, and the daemon. Any thread."""

from __future__ import annotations

import os
from abc import ABCMeta, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, cast

from ckptgate.errors import UsageError
from ckptgate.model.jobkey import JobKind, job_key_from, rank_from
from ckptgate_adapters.fsspec_ckpt import exiting, messages
from ckptgate_adapters.fsspec_ckpt.connection import Answered, Client, Introduction, client_for
from ckptgate_adapters.fsspec_ckpt.untyped import AbstractFileSystem, FileSystemMeta

__all__ = ["Base", "umask"]


class _Meta(ABCMeta, FileSystemMeta):  # type: ignore[misc]  # fsspec is untyped
    """fsspec's, which keeps instances, and the one that knows what is abstract."""


class Base(AbstractFileSystem, metaclass=_Meta):  # type: ignore[misc]  # fsspec is untyped
    """Files of a store, with ckptgate's guarantees.

    Args:
        rank, world_size: of this process, where its environment doesn't tell.
        job: id of the job that this process belongs to (as `CKPTGATE_RUN_ID`).
        durable: `close` returns once the bytes survive a power loss and are in the store, verified.
        linger_s: at its end the process waits so long for what it had sealed.
        auto_mkdir: writing makes the directories above.
        options: of the subclass, and fsspec's own.
    """

    protocol: ClassVar[Any] = "ckpt"
    root_marker = ""

    def __init__(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        job: str = "",
        durable: bool = False,
        linger_s: float = 30.0,
        auto_mkdir: bool = True,
        **options: Any,
    ) -> None:
        AbstractFileSystem.__init__(self, **options)
        if (rank is None) != (world_size is None):
            msg = "rank and world_size belong together"
            raise UsageError(msg)
        self.rank = None if rank is None else int(rank)
        self.world_size = None if world_size is None else int(world_size)
        self.job = job
        self.durable = _is_true(durable)
        self.linger_s = float(linger_s)
        self.auto_mkdir = _is_true(auto_mkdir)

    @abstractmethod
    def reach(self, is_needed: bool, may_start: bool) -> str:
        """Directory of a daemon's socket; *is_needed*: nobody answers there, so start one.

        Raises:
            CkptError: there is none, and none can (or, without *may_start*, is to) be started.
        """

    @abstractmethod
    def reach_key(self) -> Hashable:
        """What tells this daemon from others."""

    @property
    def client(self) -> Client:
        """This process's client of the daemon."""
        introduction = self.introduction()
        key = (self.reach_key(), introduction)

        def make() -> Client:
            client = Client(self.reach, introduction)
            exiting.wait_for(client, self.linger_s)
            return client

        return client_for(key, make)

    def introduction(self) -> Introduction:
        """Who this process is, by its options, else by its environment as it is now."""
        environ = os.environ
        known = rank_from(environ)
        rank, world_size = known.rank, known.world_size
        if self.rank is not None:
            rank, world_size = self.rank, self.world_size
        if self.job:
            return Introduction(rank, world_size, f"{JobKind.RUN_ID}:{self.job}")
        key = job_key_from(environ, "")
        return Introduction(rank, world_size, str(key) if key.is_shared else "")

    def call(self, request: messages.Request, *, is_long: bool = False) -> Answered:
        """Have a request answered; see `Client.call`."""
        return self.client.call(request, is_long=is_long)

    def next_id(self) -> int:
        """A number for a change."""
        return self.client.next_id()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        every: Any = path
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in every]
        text = str(os.fspath(cast("str", path)))
        for prefix in ("ckpt://", "ckpt::"):
            text = text.removeprefix(prefix)
        return text.strip("/") or cls.root_marker

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        return f"ckpt://{self._strip_protocol(name)}"

    @property
    def fsid(self) -> str:
        """The same for the same store and spool."""
        return f"ckpt-{self.reach_key()!r}"


def _is_true(value: Any) -> bool:
    """An option, which is a text where it comes from the environment."""
    return value.lower() in {"1", "true", "yes", "on"} if isinstance(value, str) else bool(value)


def umask() -> int:
    """This process's umask: the system call that tells it would change it."""
    try:
        with open("/proc/self/status", "rb") as stream:
            for line in stream:
                if line.startswith(b"Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022
