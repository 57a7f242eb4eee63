"""After a power loss: what the spool still knows, and which of its bytes can't be trusted.

It owns the rule: the database comes back as it was after some transaction, not older than the last
one that was made durable. So an attempt's tree is whole only if the recovered rows hold what came
after it: the SEAL, a commit event, or the explicit commits of all ranks that wrote here. Bytes are
proven only by a digest (the gateway synced them first): of what wasn't digested yet, any part may
be missing, whatever size and time stamps say. What isn't whole and proven is given up, loudly, with
all its bytes kept; what had its final vote is whole in the store. What was only fetched from there
nobody waited for: it is let go, and fetched again by whoever needs it.

Thread rule: called once, before any other process has the spool open.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

import msgspec

from ckptgate.engine.digest import Fingerprint, is_unchanged
from ckptgate.engine.events import Events
from ckptgate.engine.fetch import drop_copy
from ckptgate.model.states import POWER_LOST, UNDECIDED, AttemptState, FileState
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes, PendingKind, Spool

__all__ = ["BOOT_META", "begin_boot", "end_clean"]

_log = logging.getLogger(__name__)

BOOT_META: Final = "boot"
"""Setting with the boot id of the kernel that uses the spool; there is none after a clean end."""
_UNPROVEN: Final = (FileState.OPEN, FileState.QUIET)
_SHOWN: Final = 5
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def begin_boot(spool: Spool, boot_id: str, events: Events) -> bool:
    """Note under which boot the spool is in use; recover it if its last use ended without power.

    Args:
        spool: nobody else has it open.
        boot_id: of the running kernel; "" where it can't be told.
        events: where what is given up is recorded.

    Returns:
        Whether power was lost since the spool was last in use.
    """
    last = spool.get_meta(BOOT_META)
    is_lost = bool(last) and bool(boot_id) and last != boot_id
    if is_lost:
        _recover(spool, events)
    spool.set_meta(BOOT_META, boot_id)
    spool.make_durable()
    return is_lost


def end_clean(spool: Spool) -> None:
    """Make what was staged and not digested yet durable, and note the clean end.

    Args:
        spool: nobody else has it open any more.

    Raises:
        OSError: a file or the journal can't be synced; nothing is noted then.
    """
    for file in spool.files_in(_UNPROVEN):
        if file.local is LocalBytes.FULL:
            with contextlib.suppress(FileNotFoundError):
                _sync(spool.data_path(file.file))
    _keep_fetched(spool)
    spool.drop_meta(BOOT_META)
    spool.make_durable()


def _keep_fetched(spool: Spool) -> None:
    """Make what was fetched durable, and note of whole files that it is."""
    for file in spool.fetched_files():
        try:
            _sync(spool.data_path(file.file))
        except OSError as exc:
            _log.warning("fetched-copy-lost file=%d error=%s", file.file, exc)
            with spool.transaction():
                drop_copy(spool, file)
        else:
            if file.local is LocalBytes.FULL:
                spool.update_file(file.file, have=b"")


def _sync(path: str) -> None:
    fd = os.open(path, _READ_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _recover(spool: Spool, events: Events) -> None:
    told: list[tuple[str, str, str]] = []
    with spool.transaction():
        _make_missing(spool)
        for fetched in spool.fetched_files():
            if fetched.state is FileState.STORED and fetched.key:
                drop_copy(spool, fetched)
        for row in spool.attempts(states=UNDECIDED):
            if not row.is_voted:
                told += _look_at(spool, row)
        for pending in spool.pending():
            node = None if pending.ino is None else spool.node(pending.ino)
            file = None if node is None or node.file is None else spool.file(node.file)
            if pending.kind is PendingKind.WHOLE and file is not None and _distrust(spool, file):
                told.append(("power-lost", node.plain_path or pending.name if node else "", ""))
    spool.make_durable()
    for kind, subject, detail in told:
        events.record(kind, subject, detail or f"{POWER_LOST}: it must be written again")
    _log.warning("power-was-lost spool=%s given_up=%d", spool.path, len(told))


def _look_at(spool: Spool, row: AttemptRow) -> list[tuple[str, str, str]]:
    """Mark what can't be trusted of an undecided attempt; the incidents to record."""
    lost = [path for path, _, file in spool.files_of_attempt(row.id) if _distrust(spool, file)]
    reason = ""
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        reason = f"{POWER_LOST} before {', '.join(lost[:_SHOWN])}{more} were on disk"
    elif not _is_tree_whole(spool, row):
        reason = f"{POWER_LOST} while it was being written"
    if not reason:
        return []
    if row.seal_index < 0:
        # Nobody relies on it yet. A sealed one is aborted in the log, by the publisher.
        spool.update_attempt(row.id, state=AttemptState.ABANDONED, reason=reason)
    else:
        spool.update_attempt(row.id, reason=reason)
    return [("power-lost", f"{row.run}/{row.attempt or row.name}", reason)]


def _is_tree_whole(spool: Spool, row: AttemptRow) -> bool:
    """Whether the rows hold something that came after the last name that was made here."""
    if row.event or row.seal_index >= 0:
        return True
    done = set(spool.rank_commits(row.id))
    return bool(done) and set(spool.writer_ranks(row.id)) <= done


def _distrust(spool: Spool, file: FileRow) -> bool:
    """Mark the bytes of *file* unless they are proven; whether they are not."""
    if file.local is not LocalBytes.FULL:
        return False
    path = spool.data_path(file.file)
    if file.state not in _UNPROVEN:
        if not file.is_linked and os.path.exists(path) and os.stat(path).st_nlink > 1:
            # The store has a name for these bytes; the mark that says so was lost.
            file = spool.update_file(file.file, is_linked=True)
        if is_unchanged(file, path):
            return False
        if file.state is FileState.STORED and file.key:
            drop_copy(spool, file)
            return False
    seen = Fingerprint.of(path)
    problem = f"{POWER_LOST} before its bytes were on disk: it must be written again"
    spool.update_file(
        file.file,
        state=FileState.QUIET,
        size=seen.size,
        mtime_ns=seen.mtime_ns,
        ctime_ns=seen.ctime_ns,
        evidence=msgspec.structs.replace(file.evidence, problem=problem, is_valid=False),
    )
    return True


def _make_missing(spool: Spool) -> None:
    """Have a spool file for each row: one whose name was lost comes back empty, as on any disk."""
    for file in spool.files_in((*_UNPROVEN, FileState.DIGESTED)):
        if file.local is LocalBytes.FULL:
            with contextlib.suppress(FileExistsError):
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                os.close(os.open(spool.data_path(file.file), flags, 0o600))
