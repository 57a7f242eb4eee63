"""What `ckpt://` has beyond fsspec: commits, decisions, attributes. Any thread."""

from __future__ import annotations

import errno
import json
from typing import Any, Final

from ckptgate.errors import PendingError, RefusedError, UsageError
from ckptgate_adapters.fsspec_ckpt import exiting, messages
from ckptgate_adapters.fsspec_ckpt.base import Base
from ckptgate_adapters.fsspec_ckpt.connection import Client

__all__ = ["CheckpointCalls", "HeldDirectory"]

_COMMIT: Final = "user.ckptgate.commit"
_STATE: Final = "user.ckptgate.state"
_STORED: Final = "user.ckptgate.stored"
_SAVED_BY: Final = "user.ckptgate.saved_by"
_NO_STATE: Final = frozenset({errno.ENODATA, errno.ENOTSUP})
_DECIDED_WELL: Final = frozenset({"committed", "replaced"})
_GIVEN_UP: Final = frozenset({"aborted", "abandoned"})


class CheckpointCalls(Base):
    """Checkpoints."""

    def commit(self, path: str, rank: int | None = None, world_size: int | None = None) -> None:
        """Say that this rank wrote all that it has to write to the checkpoint *path*.

        Args:
            path: the checkpoint directory.
            rank: by default that of the options, else of the environment.
            world_size: likewise; with neither, it commits for all.

        Raises:
            UsageError: it is no checkpoint, or the numbers are wrong.
        """
        path = self._strip_protocol(path)
        if rank is None and world_size is None:
            introduced = self.introduction()
            rank, world_size = introduced.rank, introduced.world_size
        if (rank is None) != (world_size is None):
            msg = "rank and world_size belong together"
            raise UsageError(msg, subject=path)
        value = "all" if rank is None else f"{rank}/{world_size}"
        try:
            self.setxattr(path, _COMMIT, value.encode())
        except OSError as exc:
            raise _no_checkpoint(exc, path) from exc
        if self.durable:
            self.wait(path)

    def wait(self, path: str, timeout: float | None = None) -> None:
        """Return when the checkpoint at *path* is committed.

        Raises:
            RefusedError: it was aborted; the message says why.
            PendingError: *timeout* seconds passed.
            UsageError, FileNotFoundError: as `state`.
        """
        path = self._strip_protocol(path)
        try:
            answered = self.call(messages.Wait(path=path, timeout_s=timeout), is_long=True)
        except OSError as exc:
            raise _no_checkpoint(exc, path) from exc
        state = json.loads(answered.told.data)
        if state["state"] in _DECIDED_WELL:
            return
        if state["state"] in _GIVEN_UP:
            msg = f"{path} was not committed: {state['reason']}"
            raise RefusedError(msg, subject=path)
        missing = "; ".join(state["missing"]) or "not decided yet"
        msg = f"{path} is not committed after {timeout} s: {missing}"
        raise PendingError(msg, subject=path, hint="ckptgate status")

    def state(self, path: str) -> dict[str, Any]:
        """What is known of the checkpoint: name, attempt, state, event, reason, missing.

        Raises:
            UsageError: the path is no checkpoint.
            FileNotFoundError: it is not there, or not visible to this process.
        """
        path = self._strip_protocol(path)
        try:
            found: dict[str, Any] = json.loads(self.getxattr(path, _STATE))
        except OSError as exc:
            raise _no_checkpoint(exc, path) from exc
        return found

    def annotate(self, path: str, saved_by: dict[str, Any]) -> None:
        """Say what saved the checkpoint *path*: it is kept in its manifest."""
        path = self._strip_protocol(path)
        value = json.dumps(saved_by, sort_keys=True, separators=(",", ":"))
        try:
            self.setxattr(path, _SAVED_BY, value.encode())
        except OSError as exc:
            raise _no_checkpoint(exc, path) from exc

    def checkpoint_of(self, path: str) -> str:
        """The checkpoint directory that a path lies in, "" where it lies in none."""
        path = self._strip_protocol(path)
        found = ""
        while path:
            try:
                self.getxattr(path, _STATE)
            except OSError as exc:
                if exc.errno not in _NO_STATE:
                    raise
                return found
            found, path = path, path.rpartition("/")[0]
        return found

    def is_stored(self, path: str) -> bool:
        """Whether the store has the file's present bytes, verified (committed or not)."""
        return self.getxattr(path, _STORED) == b"yes"

    def getxattr(self, path: str, name: str) -> bytes:
        """An extended attribute, as on a mount."""
        request = messages.GetXattr(path=self._strip_protocol(path), name=name)
        return self.call(request).told.data

    def setxattr(self, path: str, name: str, value: bytes) -> None:
        """Set an extended attribute, as on a mount."""
        path = self._strip_protocol(path)
        self.call(messages.SetXattr(id=self.next_id(), path=path, name=name, value=value))
        _note(self.client, path, name)

    def hold(self, path: str) -> HeldDirectory:
        """A directory whose attributes can be asked for whatever becomes of its name."""
        path = self._strip_protocol(path)
        told = self.call(messages.Hold(path=path)).told
        return HeldDirectory(self.client, path, told.fh)


class HeldDirectory:
    """What `CkptFileSystem.hold` gives. Any thread.

    Attributes:
        path: it had then.
    """

    def __init__(self, client: Client, path: str, number: int) -> None:
        self.path = path
        self._client = client
        self._number = number

    def getxattr(self, name: str) -> bytes:
        """An extended attribute."""
        return self._client.call(messages.GetXattr(held=self._number, name=name)).told.data

    def setxattr(self, name: str, value: bytes) -> None:
        """Set an extended attribute."""
        id = self._client.next_id()
        self._client.call(messages.SetXattr(id=id, held=self._number, name=name, value=value))
        _note(self._client, self.path, name)

    def release(self) -> None:
        """It need not be held any longer."""
        number, self._number = self._number, -1
        if number >= 0:
            self._client.call(messages.Unhold(held=number))


def _note(client: Client, path: str, name: str) -> None:
    """Have what was committed by whatever call waited for at the process's end."""
    if name == _COMMIT:
        exiting.note(client, path, is_committed=True)


def _no_checkpoint(exc: OSError, path: str) -> OSError:
    """The error of a call that is for checkpoints only."""
    if exc.errno not in {errno.ENOTSUP, errno.ENODATA, errno.EINVAL}:
        return exc
    msg = f"{path!r} is no checkpoint, or the numbers are wrong: {exc.strerror or exc}"
    return UsageError(msg, subject=path, hint="name a checkpoint directory; 0 <= rank < world_size")
