"""Full check of a committed checkpoint: every byte in the store against manifest and log.

It reads chunk by chunk, so that memory stays small and a damaged file is told to its chunk. It
changes nothing. Any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import blake3

from ckptgate.engine.manifests import DIGEST_BYTES, load_chunks, load_manifest, small_chunks
from ckptgate.errors import IntegrityError, MissingError
from ckptgate.model.documents import EntryType, FileEntry, digest_of
from ckptgate.model.entries import decode_record
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.model.layout import full_key, log_key
from ckptgate.model.rules import RunState
from ckptgate.ports.store import Store

__all__ = ["VerifyReport", "fold_log", "verify_checkpoint"]

PIECE_BYTES: Final = 8 * 1024 * 1024
RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
_HINT: Final = "ckptgate restore --walk-back, or restore the store from a backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was found.

    Attributes:
        run, name, attempt: which checkpoint.
        files: how many were read.
        size_bytes: how many bytes were read and compared.
        problems: what is wrong, one line each; empty if all is well.
    """

    run: str
    name: str
    attempt: str
    files: int
    size_bytes: int
    problems: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether every byte is what was committed."""
        return not self.problems


def verify_checkpoint(store: Store, run: str, name: str) -> VerifyReport:
    """Read all of the committed checkpoint *name* and compare it with its manifest.

    Args:
        store: where it is.
        run: the run's path in the store.
        name: of the checkpoint.

    Raises:
        MissingError: it is not committed.
        IntegrityError: the log or the manifest is damaged, so that nothing can be compared.
        TransientStoreError: the store did not answer.
    """
    state = fold_log(store, run)
    attempt = state.current.get(name)
    if attempt is None:
        msg = f"no committed checkpoint {name!r} in the run {run or '/'!r}"
        raise MissingError(msg, subject=name, hint="ckptgate ls")
    manifest = load_manifest(store, run, attempt, state.attempts[attempt].manifest)
    problems: list[str] = []
    files, size = 0, 0
    for entry in manifest.entries:
        if entry.type is not EntryType.FILE:
            continue
        files += 1
        size += _verify_file(store, run, entry, problems)
    shown = store.published_attempt(run, name)
    if state.attempts[attempt].is_published and shown != attempt:
        what = f"shows {shown!r}" if shown else "is not there"
        problems.append(f"{name}: the published directory {what}, committed is {attempt!r}")
    return VerifyReport(
        run=run,
        name=name,
        attempt=attempt,
        files=files,
        size_bytes=size,
        problems=tuple(problems),
    )


def fold_log(store: Store, run: str) -> RunState:
    """The run's whole log, read and folded anew.

    Raises:
        IntegrityError: a record is torn, edited or against the rules.
        TransientStoreError: the store did not answer.
    """
    state = RunState()
    while True:
        key = log_key(run, state.length)
        try:
            data = store.get(key, limit=RECORD_BYTES_MAX)
        except MissingError:
            return state
        record = decode_record(data, index=state.length, previous=state.last_digest, subject=key)
        state.apply(record, digest_of(data))


def _verify_file(store: Store, run: str, entry: FileEntry, problems: list[str]) -> int:
    """Compare one file; adds what is wrong to *problems* and returns the bytes read."""
    try:
        if entry.chunks is None:
            chunks = small_chunks(entry)
        else:
            chunks = load_chunks(store, run, entry.chunks, entry.size)
        return _compare(store, full_key(run, entry.key), entry, chunks, problems)
    except (IntegrityError, MissingError) as exc:
        problems.append(f"{entry.path}: {exc}")
        return 0


def _compare(store: Store, key: str, entry: FileEntry, chunks: bytes, problems: list[str]) -> int:
    whole = blake3.blake3()
    done = 0
    while done < entry.size:
        index = done // CHUNK_BYTES
        end = min(entry.size, done + CHUNK_BYTES)
        chunk = blake3.blake3()
        while done < end:
            piece = store.read(key, done, min(PIECE_BYTES, end - done))
            if not piece:
                problems.append(f"{entry.path}: {key} ends at byte {done} of {entry.size}")
                return done
            whole.update(piece)
            chunk.update(piece)
            done += len(piece)
        wanted = chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if chunk.digest() != wanted:
            problems.append(f"{entry.path}: chunk {index} of {key} is not what was committed")
    if store.read(key, entry.size, 1):
        problems.append(f"{entry.path}: {key} is longer than {entry.size} bytes")
    if whole.hexdigest() != entry.digest:
        problems.append(f"{entry.path}: {key} has digest {whole.hexdigest()}, not {entry.digest}")
    return done
