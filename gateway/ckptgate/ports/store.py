"""The store: where checkpoints live. The contracts that an adapter must keep.

Keys are relative to the store's root, `/` between components, already checked by the model; an
adapter checks them again (`check_relative_path`) before it touches anything. All calls are
synchronous, may block, and may come from any thread. A failure whose outcome is unknown is
`TransientStoreError`; every call may be repeated.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptgate.errors import CkptError, RefusedError, UnusableError, UsageError
from ckptgate.model.documents import Manifest, PointerValue
from ckptgate.model.reclaim import Part

__all__ = [
    "DataObjects",
    "DigestedFile",
    "ObjectReader",
    "PlainEntry",
    "PlainKind",
    "PlainTree",
    "Publication",
    "Reclamation",
    "Records",
    "Store",
    "Streams",
    "VerifyMode",
    "Won",
    "always",
    "check_verify_mode",
    "put_each",
    "reclaim_each",
]


class VerifyMode(enum.StrEnum):
    """How `DataObjects.verify` proves that the store has the bytes."""

    SIZE = "size"
    CHECKSUM = "checksum"
    """The store's own checksum of all bytes against one computed while they were sent."""
    READBACK = "readback"


class PlainKind(enum.StrEnum):
    """What a plain name in the store is."""

    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainEntry:
    """A name in the store outside the gateway's own folders."""

    name: str
    kind: PlainKind
    size: int
    mode: int
    mtime_ns: int
    uid: int
    gid: int
    target: str = ""
    is_managed: bool = False
    """A directory that ckptgate published (it holds `.ckptgate/manifest.json`)."""
    has_runs: bool = False
    """A directory that holds `.ckptgate/` itself: a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestedFile:
    """A local file that is quiet, durable where it lies, and whose digests are known.

    Attributes:
        path: in the local file system.
        size: bytes.
        digest: BLAKE3 of all, hex.
        chunks: 32 bytes for each chunk of `CHUNK_BYTES`.
        may_link: the bytes will never change again, so the store may share them with *path*
            (hard link or reflink) where both lie on one file system.
    """

    path: str
    size: int
    digest: str
    chunks: bytes
    may_link: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Won:
    """What came of a removal.

    Attributes:
        size: bytes that it won.
        refused: key of each part that the store doesn't let go -> why.
    """

    size: int
    refused: Mapping[str, CkptError]


def always() -> bool:
    """The default of `Publication.publish`."""
    return True


class Records(Protocol):
    """Small immutable objects; all that decides is made of them."""

    def create(self, key: str, data: bytes) -> None:
        """Store *data* under *key*, durably, whole, only if nothing is there.

        If exactly *data* is already there, that is success: an earlier call landed (every record
        that decides carries its writer's id, so equal bytes are ours). Missing parent directories
        are made.

        Raises:
            ExistsError: other bytes are there.
            TransientStoreError: nothing is known; call again with the same arguments.
            FullError, UnusableError: nothing was stored.
        """
        ...

    def get(self, key: str, *, limit: int = ...) -> bytes:
        """The bytes under *key*, as fresh as the store can tell (no client cache answers).

        Raises:
            MissingError: nothing is there now.
            IntegrityError: more than *limit* bytes.
            TransientStoreError: nothing is known.
        """
        ...

    def children(self, prefix: str) -> list[str]:
        """Names directly below *prefix*, sorted; everything created before the call is listed.

        Names of unfinished writes are left out. A missing prefix has no children.
        """
        ...


class ObjectReader(Protocol):
    """Reads the checkpoints' bytes."""

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset* (short only at the end).

        Raises:
            MissingError, TransientStoreError.
        """
        ...

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        """As `read`, into the caller's own memory: how many bytes of *view* are the object's.

        What *view* has beyond them, or after an error, means nothing.
        """
        ...


@runtime_checkable
class Streams(Protocol):
    """What a store may offer beside `ObjectReader`: many bytes in their order, at little cost."""

    def pieces(
        self, key: str, offset: int, length: int, buffer: memoryview
    ) -> Generator[memoryview]:
        """Up to *length* bytes at *offset* (short only at the end), in pieces, as they come.

        Each piece is a part of *buffer*, and the store's again when the next is asked for. That all
        are of one version is for the caller to prove, by a digest.

        Raises:
            MissingError, TransientStoreError.
        """
        ...


class DataObjects(ObjectReader, Protocol):
    """The checkpoints' bytes."""

    def put(self, key: str, source: DigestedFile) -> None:
        """Store the file under *key*, durably on return; replaces a failed earlier try.

        An error of write, fsync or close is final for the bytes written so far: the adapter starts
        over under a new temporary name and never repeats an fsync.

        Raises:
            FullError: no space; nothing visible was left.
            IntegrityError: the source no longer has the size it is said to have.
            TransientStoreError: unknown; call again.
        """
        ...

    def verify(self, key: str, source: DigestedFile, mode: VerifyMode) -> None:
        """Prove that *key* holds exactly the bytes of *source*.

        Raises:
            IntegrityError: size or digest differ; names the key.
            MissingError: nothing is there.
            TransientStoreError: unknown.
            UsageError: not one of the store's `verify_modes`.
        """
        ...

    def put_all(self, files: Mapping[str, DigestedFile], mode: VerifyMode) -> dict[str, OSError]:
        """`put` and `verify` each of *files* (by key); the error of each that failed.

        Durable and proved on return are those that are not in the result. Many small files cost
        less together; `put_each` does for a store where they don't.
        """
        ...

    def local_path(self, key: str) -> str | None:
        """A path of the local file system where *key*'s bytes can be reflinked or None."""
        ...


class Publication(Protocol):
    """The committed state under its own name, derived from the log; all steps are idempotent."""

    def publish(
        self,
        run: str,
        manifest: Manifest,
        manifest_bytes: bytes,
        *,
        is_due: Callable[[], bool] = always,
    ) -> None:
        """Make `run/<name>` show exactly *manifest*, replacing any earlier attempt's.

        Safe to repeat, and to run in several processes at once for the same manifest. A foreign
        directory (not made by ckptgate) in its place is moved to `run/.ckptgate/displaced/`, never
        deleted.

        *is_due* is asked once the store has looked at what it is to replace, and again whenever it
        has to look again; if it says no, nothing is done. A store that can replaces only what it
        had looked at: so a publisher that was slow never replaces what is newer than its answer.

        Raises:
            NotCopiedError: it is published, as always; but the copies under plain names that the
                store was told to make aren't there, since it can't have one of these names.
        """
        ...

    def published_attempt(self, run: str, name: str) -> str:
        """The attempt that `run/<name>` shows now, or "" (nothing or a foreign directory)."""
        ...

    def published_problems(self, run: str, manifest: Manifest, manifest_bytes: bytes) -> list[str]:
        """How `run/<name>` differs from what `publish` made with these arguments, one line each.

        Names, types, bytes, targets and the gateway's own files count; what nothing can tell (an
        object whose very bytes are published) isn't read again. Changes nothing.
        """
        ...

    def unpublish(self, run: str, name: str, attempt: str) -> None:
        """Hide `run/<name>` if it shows *attempt*; the bytes stay below `run/.ckptgate/`."""
        ...

    def set_pointer(self, run: str, value: PointerValue) -> None:
        """Make `run/<pointer>` be *value*, atomically for readers."""
        ...

    def remove_pointer(self, run: str, pointer: str) -> None:
        """Remove the pointer if it is there."""
        ...

    def pointer_content(self, run: str, pointer: str) -> str | None:
        """The symlink's target or the text now under that name, None if there is none."""
        ...

    def lock_run(self, run: str) -> AbstractContextManager[None]:
        """Context manager: one publisher of this run at a time, as far as the store can tell.

        Advisory: correctness never depends on it (the log decides); it avoids needless work.
        """
        ...


class PlainTree(Protocol):
    """Plain names: directories, live and whole files, outside of checkpoints.

    Paths are relative to the store's root, "" is the root. `.ckptgate` never appears.
    """

    def plain_stat(self, path: str) -> PlainEntry:
        """What is there now, fresh. Raises MissingError."""
        ...

    def plain_list(self, path: str) -> list[PlainEntry]:
        """The directory's entries. Raises MissingError."""
        ...

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a plain file."""
        ...

    def plain_put(self, path: str, source: str, *, mode: int, mtime_ns: int) -> None:
        """Replace the file *path* by a copy of the local file *source*, atomically, durably."""
        ...

    def plain_mkdir(self, path: str, mode: int) -> None:
        """Make a directory; an existing one is success."""
        ...

    def plain_symlink(self, path: str, target: str) -> None:
        """Make or replace a symlink."""
        ...

    def plain_remove(self, path: str, *, is_dir: bool) -> None:
        """Remove a file, symlink or empty directory; nothing there is success."""
        ...

    def plain_rename(self, old: str, new: str) -> None:
        """Rename; *old* missing and *new* there is success (an earlier call landed)."""
        ...


class Reclamation(Protocol):
    """Removing what nothing refers to any more; whoever asks has proved that it may go.

    Only names that the gateway itself gives are ever listed or removed. What else lies there, and
    symlinks, are left alone and never followed.
    """

    def attempt_parts(self, run: str, attempt: str) -> list[Part]:
        """All that the store has of an attempt, but its intent (its number is never used again).

        An attempt that isn't there has none.
        """
        ...

    def unfinished(self, directory: str) -> list[Part]:
        """Unfinished writes in a plain directory, and in the gateway's own if it is a run.

        Their keys are below *directory*. Somebody may still be at them: see `Part.stamp`.
        """
        ...

    def reclaim(self, run: str, part: Part) -> int:
        """Remove it for good; the bytes that this won. Nothing there is success.

        A crash leaves a part that is listed again.

        Raises:
            RefusedError, UnusableError: the store doesn't let it go (a lock, a missing permission).
            TransientStoreError: nothing is known; call again.
        """
        ...

    def reclaim_all(self, run: str, parts: Sequence[Part]) -> Won:
        """`reclaim` each of *parts*, kind by kind in their order; many cost less together.

        What the store doesn't let go stops no other. `reclaim_each` does for a store where it
        makes no difference.

        Raises:
            TransientStoreError: nothing is known of some; call again.
        """
        ...

    def tidy(self, run: str, attempt: str) -> None:
        """Remove what the parts have left: directories of the attempt that are empty now."""
        ...


class Store(Records, DataObjects, Publication, PlainTree, Reclamation, Protocol):
    """All of it, and what it is."""

    @property
    def url(self) -> str:
        """How a user names it, without secrets."""
        ...

    @property
    def default_verify(self) -> VerifyMode:
        """The cheapest that is a proof; of what a network file system has, only `readback` is."""
        ...

    @property
    def verify_modes(self) -> frozenset[VerifyMode]:
        """What may be asked for; `verify` refuses what is not among them."""
        ...

    def probe(self) -> None:
        """Prove at start-up that the store can do what is needed.

        Raises:
            UnusableError: missing, not a directory, read-only, full, or without put-if-absent
                (the message names which, the hint the remedy).
            FormatVersionError: written by another version.
        """
        ...

    def close(self) -> None:
        """Give up connections, if there are any: nothing is called afterwards."""
        ...


def check_verify_mode(mode: VerifyMode, offered: Collection[VerifyMode], url: str) -> None:
    """Refuse a way to verify that the store at *url* doesn't offer.

    Raises:
        UsageError: the message names the mode, the hint those that are offered.
    """
    if mode not in offered:
        msg = f"{url} can't be verified by {mode.value!r}"
        raise UsageError(msg, subject=url, hint=f"verify: {' or '.join(sorted(offered))}")


def put_each(
    store: DataObjects, files: Mapping[str, DigestedFile], mode: VerifyMode
) -> dict[str, OSError]:
    """`DataObjects.put_all`, one file after the other."""
    failed: dict[str, OSError] = {}
    for key, source in files.items():
        try:
            store.put(key, source)
            store.verify(key, source, mode)
        except OSError as exc:
            failed[key] = exc
    return failed


def reclaim_each(store: Reclamation, run: str, parts: Sequence[Part]) -> Won:
    """`Reclamation.reclaim_all`, one part after the other."""
    size = 0
    refused: dict[str, CkptError] = {}
    for part in parts:
        try:
            size += store.reclaim(run, part)
        except (RefusedError, UnusableError) as exc:
            refused[part.key] = exc
    return Won(size=size, refused=refused)
