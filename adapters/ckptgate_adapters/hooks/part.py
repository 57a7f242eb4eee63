"""A rank's part of a checkpoint: it begins, says how it saves, and commits or gives up.

Owns the rules that make a save exact. A rank that begins again what it began before in the same try
begins a new try: what is left of the earlier one is never mixed with it. A rank that fails gives
the try up for all ranks, so that nobody publishes it. Committing what a framework's own marker has
sealed meanwhile is no error. One thread a part.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Generator, Mapping
from typing import Any, Final

from ckptgate.errors import ExistsError, PendingError, RefusedError, UsageError
from ckptgate.model.jobkey import rank_from
from ckptgate.model.saving import canonical, check_record
from ckptgate_adapters.hooks.place import Place, place_of
from ckptgate_adapters.hooks.versions import loaded_versions

__all__ = ["BEGIN", "COMMIT", "GIVE_UP", "SAVED_BY", "STATE", "Part", "giving_up", "ranks_of"]

_log = logging.getLogger(__name__)

BEGIN: Final = "user.ckptgate.begin"
SAVED_BY: Final = "user.ckptgate.saved_by"
COMMIT: Final = "user.ckptgate.commit"
GIVE_UP: Final = "user.ckptgate.abort"
STATE: Final = "user.ckptgate.state"

_TRIES_MAX: Final = 8
_REASON_BYTES_MAX: Final = 1000
_POLL_S: Final = 0.05
EARLIER_WAIT_S: Final = 30.0
"""A rank that has committed before waits so long for the others, before it begins anew."""
GIVE_UP_WAIT_S: Final = 15.0
"""Until an attempt that was given up is aborted; with the store away it is later."""

_OPEN: Final = frozenset({"open", "sealed"})
_ENDED: Final = frozenset({"aborted", "abandoned"})
_DONE: Final = frozenset({"committed", "replaced"})


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    """Both numbers, by default those of the launcher's environment; (None, None): for all.

    Raises:
        UsageError: one without the other, or impossible ones.
    """
    if rank is None and world_size is None:
        known = rank_from(os.environ)
        return known.rank, known.world_size
    if rank is None or world_size is None:
        msg = "rank and world_size belong together"
        raise UsageError(msg)
    if not 0 <= rank < world_size:
        msg = f"rank {rank} is not between 0 and {world_size - 1}"
        raise UsageError(msg)
    return rank, world_size


class Part:
    """One rank's part of the checkpoint at an address.

    Attributes:
        address: of the checkpoint's directory: a path on a mount, or a `ckpt://` URL.
        rank, world_size: None: for all ranks.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._place = place_of(address)
        self._held: Place | None = None
        self.address = self._place.address
        self.rank, self.world_size = rank, world_size

    @property
    def _who(self) -> bytes:
        return b"all" if self.rank is None else f"{self.rank}/{self.world_size}".encode()

    @property
    def _now(self) -> Place:
        """The try that was begun, if one was; else what the name means now."""
        return self._held or self._place

    def begin(self, *, is_new: bool = False) -> None:
        """Make the directory, and say that this rank begins to write.

        What a rank of this number left there in an earlier try is given up. A committed checkpoint
        is revised.

        Args:
            is_new: a committed checkpoint of that name is an error.

        Raises:
            ExistsError: *is_new*, and it is committed.
            PendingError: an earlier try is still undecided.
            UsageError: it is no place for a checkpoint.
            OSError: as of mkdir.
        """
        self.release()
        for _ in range(_TRIES_MAX):
            self._place.make()
            try:
                # An ordinary file system would take the attribute and do nothing about it.
                found = self._place.ask(STATE)
                if is_new and found["state"] in _DONE:
                    msg = f"{self.address} is committed already"
                    hint = (
                        "save under another step, or remove it first: on one rank, then a barrier"
                    )
                    raise ExistsError(msg, subject=self.address, hint=hint)
                self._place.say(BEGIN, self._who)
                self._held = self._place.held()
            except FileExistsError as exc:
                if isinstance(exc, ExistsError):
                    raise
                self._end_earlier_try()
            except OSError as exc:
                # Another rank gave this try up a moment ago: the name is free for the next one.
                if exc.errno not in {errno.ENOENT, errno.ESTALE}:
                    raise
                time.sleep(_POLL_S)
            else:
                return
        msg = f"{self.address} could not be begun: others give it up each time"
        raise PendingError(msg, subject=self.address, hint="ckptgate status")

    def _end_earlier_try(self) -> None:
        """This rank began the attempt before: wait for it if it may still be whole, or give it up.

        It may be if it is sealed, or if the process that committed this rank's part still runs: the
        other ranks are about to commit theirs. If that one is gone so are the others.

        Raises:
            PendingError: it is still undecided then.
        """
        try:
            earlier = self._place.held()
        except FileNotFoundError:
            return
        try:
            found = earlier.ask(STATE)
            number = -1 if self.rank is None else self.rank
            is_done = number in found["ranks_committed"] and number not in found["ranks_ended"]
            if found["state"] == "sealed" or is_done:
                found = _when_decided(earlier, EARLIER_WAIT_S)
            if found["state"] == "open":
                _log.warning("earlier-try-given-up path=%s rank=%s", self.address, self.rank)
                earlier.say(GIVE_UP, f"rank {number} began it anew".encode())
                found = _when_decided(earlier, GIVE_UP_WAIT_S)
            if found["state"] in _OPEN:
                msg = f"an earlier try of {self.address} is still undecided"
                raise PendingError(msg, subject=self.address, hint="ckptgate status")
        finally:
            earlier.release()

    def record(self, saved_by: Mapping[str, Any]) -> None:
        """Say how this rank saves: it is kept in the manifest, with the versions that are loaded.

        Raises:
            UsageError: it is no record (see FORMAT.md), or nothing of a checkpoint.
            OSError: EPERM, EBUSY: it is decided, or just being decided.
        """
        record = {key: value for key, value in saved_by.items() if value is not None}
        said = record.get("versions", {})
        if isinstance(said, Mapping):
            record["versions"] = {**loaded_versions(), **said}
        if self.world_size is not None:
            record.setdefault("world_size", self.world_size)
        if self.rank is not None:
            record["rank"] = self.rank
        self._now.say(SAVED_BY, canonical(check_record(record, subject=self.address)))

    def commit(self, *, is_for_all: bool = False) -> None:
        """Say that this rank's part is written.

        Args:
            is_for_all: the caller knows that all ranks' parts are.

        Raises:
            RefusedError: the attempt was given up meanwhile, by another rank or by its deadline.
            UsageError: no checkpoint is there, or other ranks say another world size.
        """
        if self._held is None:
            # An ordinary file system would take the attribute and do nothing about it.
            self._place.ask(STATE)
        try:
            self._now.say(COMMIT, b"all" if is_for_all else self._who)
        except OSError as exc:
            if exc.errno not in {errno.EPERM, errno.EINVAL, errno.ENOENT}:
                raise
            self._check_not_ended(exc)
            msg = f"cannot commit {self.address!r} as {self._who.decode()}: {exc.strerror or exc}"
            hint = "name a checkpoint directory on a ckptgate mount; 0 <= rank < world_size"
            raise UsageError(msg, subject=self.address, hint=hint) from exc

    def _check_not_ended(self, error: OSError) -> None:
        try:
            found = self._now.ask(STATE)
        except FileNotFoundError:
            msg = f"{self.address} was given up by another rank, or is not there"
            raise RefusedError(msg, subject=self.address) from error
        if found["state"] in _ENDED:
            msg = f"{self.address} was not committed: {found['reason']}"
            raise RefusedError(msg, subject=self.address) from error

    def abort(self, reason: str) -> None:
        """Have the attempt aborted, for all ranks.

        Raises:
            FileNotFoundError: it is not there, or not visible to this process.
            OSError: EPERM, it is committed.
        """
        self._now.say(GIVE_UP, reason.encode("utf-8", "backslashreplace")[:_REASON_BYTES_MAX])

    def give_up(self, reason: str, *, wait_s: float = GIVE_UP_WAIT_S) -> None:
        """The same for who has an error of his own to tell: it never fails, and waits for it.

        Nothing happens to an attempt that is decided.
        """
        try:
            self.abort(reason)
            if _when_decided(self._now, wait_s)["state"] in _OPEN:
                _log.warning("give-up-pending path=%s wait_s=%g", self.address, wait_s)
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ESTALE}:
                _log.warning("give-up-failed path=%s error=%s", self.address, exc)

    def state(self) -> dict[str, Any]:
        """What is known of the attempt: its state, reason, missing."""
        return self._now.ask(STATE)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the attempt is committed: verified in the store.

        Raises:
            RefusedError: it was aborted; the message says why.
            PendingError: *timeout_s* passed.
        """
        place = self._now
        held = place.held() if place is self._place else place
        try:
            _wait(held, self.address, timeout_s)
        finally:
            if held is not place:
                held.release()

    def release(self) -> None:
        """The attempt is asked for no longer by this object."""
        held, self._held = self._held, None
        if held is not None:
            held.release()


@contextlib.contextmanager
def giving_up(part: Part | None) -> Generator[None]:
    """Give the attempt up, for all ranks, if the block fails."""
    try:
        yield
    except BaseException as exc:
        # An interrupt or exit leaves the part as unfinished as an error does.
        if part is not None:
            part.give_up(f"rank {part.rank or 0} failed: {type(exc).__name__}: {exc}")
            part.release()
        raise


def _when_decided(place: Place, limit_s: float) -> dict[str, Any]:
    """The state once it is no longer open or sealed, or after that time."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            found = place.ask(STATE)
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ESTALE}:
                raise
            return {"state": "abandoned", "reason": "removed", "missing": []}
        if found["state"] not in _OPEN or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)


def _wait(place: Place, address: str, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            found = place.ask(STATE)
        except FileNotFoundError as exc:
            # Of a URL only the name is known, which an attempt that was given up has no longer.
            msg = f"{address} was given up, or removed"
            raise RefusedError(msg, subject=address) from exc
        if found["state"] in _DONE:
            return
        if found["state"] in _ENDED:
            msg = f"{address} was not committed: {found['reason']}"
            raise RefusedError(msg, subject=address)
        if deadline is not None and time.monotonic() >= deadline:
            missing = "; ".join(found["missing"]) or "not decided yet"
            msg = f"{address} is not committed after {timeout_s} s: {missing}"
            raise PendingError(msg, subject=address, hint="ckptgate status")
        time.sleep(_POLL_S)
