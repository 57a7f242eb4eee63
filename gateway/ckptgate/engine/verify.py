"""Full check of a committed checkpoint: every byte in the store against manifest and log.

What people without ckptgate read is checked, too: the published directory, and the run's pointers.

It reads several files, and ranges of them, at once, in bounded memory, and tells a damaged file to
its chunk. It changes nothing. Any thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import blake3

from ckptgate.engine.each_file import for_each_file
from ckptgate.engine.manifests import DIGEST_BYTES, entry_chunks, load_manifest
from ckptgate.engine.ranges import Ranges
from ckptgate.errors import IntegrityError, MisplacedError, MissingError
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    EntryType,
    FileEntry,
    Manifest,
    PointerKind,
    digest_of,
)
from ckptgate.model.entries import decode_record
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.model.layout import full_key, join_key, log_key, manifest_key
from ckptgate.model.rules import RunState
from ckptgate.ports.store import PlainKind, Store

__all__ = ["VerifyReport", "fold_log", "verify_checkpoint"]

RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
_HINT: Final = "export an older checkpoint (ckptgate ls RUN), or restore the store from a backup"


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
    files = [entry for entry in manifest.entries if entry.type is EntryType.FILE]
    ranges = Ranges(store)

    def look(entry: FileEntry) -> tuple[int, list[str]]:
        return _verify_file(store, ranges, run, entry)

    found = for_each_file(files, look)
    problems = [problem for _, of_file in found for problem in of_file]
    problems += _shown_problems(store, run, manifest, state)
    return VerifyReport(
        run=run,
        name=name,
        attempt=attempt,
        files=len(files),
        size_bytes=sum(size for size, _ in found),
        problems=tuple(problems),
    )


def _shown_problems(store: Store, run: str, manifest: Manifest, state: RunState) -> list[str]:
    """What is wrong with the published state; only what the newest log still says counts."""
    while True:
        if state.current.get(manifest.name) != manifest.attempt:
            return []
        problems = _published(store, run, manifest, state)
        problems += _pointers(store, run, manifest.name, state)
        if not problems:
            return []
        # A publisher may have been at it: what the log meant meanwhile is what must be shown.
        newer = fold_log(store, run)
        if newer.length == state.length:
            return problems
        state = newer


def _published(store: Store, run: str, manifest: Manifest, state: RunState) -> list[str]:
    attempt = state.attempts[manifest.attempt]
    if not attempt.is_published:
        return []
    name = manifest.name
    shown = store.published_attempt(run, name)
    if shown not in {"", attempt.attempt}:
        return [f"{name}: the published directory shows {shown!r}, not {attempt.attempt!r}"]
    key = manifest_key(run, attempt.attempt, attempt.manifest)
    return store.published_problems(run, manifest, store.get(key, limit=MAX_DOCUMENT_BYTES))


def _pointers(store: Store, run: str, name: str, state: RunState) -> list[str]:
    """Pointers that lead to the checkpoint and shouldn't, or should and don't."""
    problems: list[str] = []
    for pointer, folded in state.pointers.items():
        value = folded.value
        target = state.attempts.get(state.current.get(value.target, ""))
        if target is None or not target.is_published:
            continue
        found, is_link = _pointer(store, run, pointer)
        wanted = (value.content, value.kind is PointerKind.SYMLINK)
        if name in {value.target, _last_name(found)} and (found, is_link) != wanted:
            kinds = [("link" if link else "text") for link in (is_link, wanted[1])]
            problems.append(
                f"{pointer}: is the {kinds[0]} {found!r} in the store, "
                f"the log says the {kinds[1]} {value.content!r}"
            )
    return problems


def _pointer(store: Store, run: str, pointer: str) -> tuple[str, bool]:
    """What is under a pointer's name, "" for nothing that could be one; whether it is a symlink."""
    try:
        found = store.pointer_content(run, pointer)
        if found is None:
            return "", False
        return found, store.plain_stat(join_key(run, pointer)).kind is PlainKind.SYMLINK
    except (IntegrityError, MissingError):
        return "", False


def _last_name(content: str) -> str:
    return content.strip().rstrip("/").rpartition("/")[2]


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


def _verify_file(store: Store, ranges: Ranges, run: str, entry: FileEntry) -> tuple[int, list[str]]:
    """Compare one file: bytes that were read to their end, and what is wrong."""
    try:
        chunks = entry_chunks(store, run, entry)
        key = full_key(run, entry.key)
        problems = _compare(ranges, key, entry, chunks)
        if store.read(key, entry.size, 1):
            problems.append(f"{entry.path}: {key} is longer than {entry.size} bytes")
    except (IntegrityError, MissingError, MisplacedError) as exc:
        return 0, [f"{entry.path}: {exc}"]
    return entry.size, problems


def _compare(ranges: Ranges, key: str, entry: FileEntry, chunks: bytes) -> list[str]:
    """Which chunks, and whether the whole, have another digest."""
    problems: list[str] = []
    whole, chunk, done = blake3.blake3(), blake3.blake3(), 0
    spans = [(at, min(CHUNK_BYTES, entry.size - at)) for at in range(0, entry.size, CHUNK_BYTES)]
    with contextlib.closing(ranges.read(key, spans)) as pieces:
        for piece in pieces:
            whole.update(piece)
            chunk.update(piece)
            done += len(piece)
            if done % CHUNK_BYTES and done < entry.size:
                continue
            index = (done - 1) // CHUNK_BYTES
            if chunk.digest() != chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
                problems.append(f"{entry.path}: chunk {index} of {key} is not what was committed")
            chunk = blake3.blake3()
    if whole.hexdigest() != entry.digest:
        problems.append(f"{entry.path}: {key} has digest {whole.hexdigest()}, not {entry.digest}")
    return problems
