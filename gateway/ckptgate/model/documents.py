"""The documents that lie in the store, as frozen values with one strict codec.

FORMAT.md describes them field by field. `decode` refuses unknown fields, wrong types, hostile paths
and torn text, and names what was wrong. A document's digest is the BLAKE3 of its stored bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Final, TypeAlias, TypeVar

import blake3
import msgspec

from ckptgate.errors import FormatVersionError, IntegrityError, InvalidNameError, UsageError
from ckptgate.model.ids import (
    CHUNK_BYTES,
    Digest,
    check_attempt_id,
    check_checkpoint_name,
    check_digest,
    check_member_id,
    check_name,
    check_relative_path,
    parents_of,
)
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.model.saving import SavedBy, Saving

__all__ = [
    "FORMAT_VERSION",
    "ChunkRef",
    "Document",
    "EntryType",
    "Evidence",
    "FileEntry",
    "Intent",
    "Manifest",
    "Member",
    "Mover",
    "NameOp",
    "NameOpKind",
    "PointerKind",
    "PointerValue",
    "StoreFormat",
    "Vote",
    "decode",
    "digest_of",
    "encode",
]

FORMAT_VERSION: Final = 1
MAX_DOCUMENT_BYTES: Final = 256 * 1024 * 1024
"""No document is larger (10,000 files take about 5 MiB)."""
MAX_POINTER_BYTES: Final = 4096  # of a pointer's text or symlink

# Bounds that a spool's database, a file system and a loop over all ranks can take. They are checked
# where a document is decoded; the codec names the place.
_Int63: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_TimeNs: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Mode: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
_Owner: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=999_999)]
_WorldSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all stored documents."""


class EntryType(enum.StrEnum):
    """What a path of a checkpoint is."""

    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"


class PointerKind(enum.StrEnum):
    """How a pointer is stored: as a symlink, or as a text file."""

    SYMLINK = "symlink"
    TEXT = "text"


class PointerValue(Document, frozen=True, kw_only=True):
    """A name beside the checkpoints that names one of them.

    Attributes:
        pointer: its own name, such as `latest`.
        kind: symlink or text.
        target: name of the checkpoint that it means.
        content: the symlink's target or the file's text, exactly as the trainer wrote it.
    """

    pointer: str
    kind: PointerKind
    target: str
    content: str

    def __post_init__(self) -> None:
        check_name(self.pointer)
        check_checkpoint_name(self.target)
        size = len(self.content.encode("utf-8", "replace"))
        is_link = self.kind is PointerKind.SYMLINK
        if size > MAX_POINTER_BYTES or "\0" in self.content or (is_link and not size):
            msg = f"pointer {self.pointer!r} has an unusable content ({size} bytes)"
            raise InvalidNameError(msg, subject=self.pointer)


class ChunkRef(Document, frozen=True, kw_only=True):
    """Where the chunk digests of a file larger than one chunk are.

    Attributes:
        table: key of a binary object of 32-byte digests, below the run's directory.
        start: index of the file's first digest in it.
    """

    table: str
    start: _Int63

    def __post_init__(self) -> None:
        check_relative_path(self.table)


class Evidence(Document, frozen=True, kw_only=True):
    """What the member that staged a file knows of its completeness.

    Attributes:
        container: kind that was recognised (`torch-zip`, `safetensors`, `npz`, `json`, ...), or "".
        is_valid: the container proves itself; False where there is none.
        is_torn: its writer died with it open.
        has_hole: part of its length was never written.
        problem: why the container is not valid, or "".
        rank: rank that wrote it, -1 where unknown.
    """

    container: str = ""
    is_valid: bool = False
    is_torn: bool = False
    has_hole: bool = False
    problem: str = ""
    rank: _Rank = -1


class FileEntry(Document, frozen=True, kw_only=True):
    """One path of a checkpoint.

    Attributes:
        path: relative to the checkpoint, `/` between components.
        type: file, dir or symlink.
        mode: permission bits.
        mtime_ns: modification time, ns since the epoch.
        size: bytes (0 for a directory or symlink).
        digest: BLAKE3 of a file's bytes, "" for others.
        key: where the bytes are, below the run's directory; "" for others.
        chunks: digests of its chunks; None for a file of at most one chunk.
        target: of a symlink, else "".
        uid, gid: owner.
        evidence: of its completeness.
    """

    path: str
    type: EntryType
    mode: _Mode
    mtime_ns: _TimeNs
    size: _Int63 = 0
    digest: str = ""
    key: str = ""
    chunks: ChunkRef | None = None
    target: str = ""
    uid: _Owner = 0
    gid: _Owner = 0
    evidence: Evidence = Evidence()

    def __post_init__(self) -> None:
        check_relative_path(self.path)
        if self.type is EntryType.FILE:
            check_digest(self.digest)
            check_relative_path(self.key)
            if self.size < 0 or (self.size > CHUNK_BYTES) != (self.chunks is not None):
                msg = f"size {self.size} and chunk digests of {self.path!r} contradict each other"
                raise InvalidNameError(msg, subject=self.path)
        elif self.type is EntryType.SYMLINK:
            _check_symlink(self.path, self.target)


def _check_symlink(path: str, target: str) -> None:
    """Refuse a symlink that leaves its checkpoint."""
    if target.startswith("/") or not target or "\0" in target:
        msg = f"symlink {path!r} leaves the checkpoint: {target!r}"
        raise InvalidNameError(msg, subject=path)
    depth = path.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in {"", "."} else 1
        if depth < 0:
            msg = f"symlink {path!r} leaves the checkpoint: {target!r}"
            raise InvalidNameError(msg, subject=path)


class StoreFormat(Document, frozen=True, kw_only=True):
    """`R/.ckptgate/format.json`: which format a run directory has."""

    format: int = FORMAT_VERSION
    created_by: str = ""


class Intent(Document, frozen=True, kw_only=True):
    """`intent.json`: an attempt exists."""

    format: int = FORMAT_VERSION
    attempt: str
    job_key: str
    is_shared: bool
    generation: int
    member: str
    created_at: str
    world_size: _WorldSize | None = None
    base: str = ""

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)
        check_member_id(self.member)


class Member(Document, frozen=True, kw_only=True):
    """`members/<member>.json`: a gateway takes part in the attempt."""

    format: int = FORMAT_VERSION
    attempt: str
    member: str
    host: str
    joined_at: str
    ranks: tuple[_Rank, ...] = ()
    world_size: _WorldSize | None = None

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)
        check_member_id(self.member)


class Mover(Document, frozen=True, kw_only=True):
    """`movers/<member>.json`: some of this member's name operations aren't `mkdir`.

    Written before the first of them. A directory that others made is no matter of a member that
    has nothing in it, but a renamed one may hold its files: so it reads what movers did, and not
    what each member made.
    """

    format: int = FORMAT_VERSION
    attempt: str
    member: str

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)
        check_member_id(self.member)


class NameOpKind(enum.StrEnum):
    """What happened to a directory of an open attempt."""

    MKDIR = "mkdir"
    RENAME = "rename"
    RMDIR = "rmdir"
    ROOT_RENAME = "root-rename"


class NameOp(Document, frozen=True, kw_only=True):
    """`names/<member>/<n>.json`: a directory of the attempt was made, renamed or removed.

    Attributes:
        n: dense number from 0 for this member.
        op: what happened; `root-rename` gives the whole checkpoint another name.
        path: the directory ("" for `root-rename`).
        to: its new path, or the checkpoint's new name; "" where there is none.
        mode: of a new directory.
        after: renames of other members that the paths have in them: member -> how many of its name
            operations, up to its last rename. Those of this member come in order.
    """

    format: int = FORMAT_VERSION
    attempt: str
    member: str
    n: _Int63
    op: NameOpKind
    path: str
    to: str = ""
    mode: _Mode = 0o755
    after: dict[str, _Int63] = {}

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)
        check_member_id(self.member)
        _check_after(self.after)
        if self.op is NameOpKind.ROOT_RENAME:
            check_checkpoint_name(self.to)
            return
        check_relative_path(self.path)
        if self.op is NameOpKind.RENAME:
            check_relative_path(self.to)


def _check_after(after: Iterable[str]) -> None:
    for member in after:
        check_member_id(member)


class Vote(Document, frozen=True, kw_only=True):
    """`votes/<member>/<n>.json`: a member's proof of its part; each replaces its previous one.

    Attributes:
        n: dense number from 0 for this member.
        is_final: the member saw the SEAL and then found all its files quiet, digested and verified
            in the store.
        seal_index: index of the SEAL that it saw, -1 for none.
        committed_ranks: ranks that committed explicitly through this member.
        committed_all: somebody committed for all ranks (`commit --all`).
        world_size: what explicit commits or the environment said, None where unknown.
        base: attempt that its tree is a revision of: what it lacks of that was removed. "" if none.
        pointers: pending pointers of this member that name the checkpoint.
        chunk_table: key of the chunk digests of this vote's large files, "" where there are none.
        after: renames that the paths have in them, this member's own among them: member -> how many
            of its name operations, up to its last rename.
        entries: its files, directories and symlinks.
        saved_by: what ranks recorded through this member; absent where none did.
    """

    format: int = FORMAT_VERSION
    attempt: str
    member: str
    n: _Int63
    is_final: bool
    seal_index: int = -1
    committed_ranks: tuple[_Rank, ...] = ()
    committed_all: bool = False
    world_size: _WorldSize | None = None
    base: str = ""
    pointers: tuple[PointerValue, ...] = ()
    chunk_table: str = ""
    after: dict[str, _Int63] = {}
    entries: tuple[FileEntry, ...] = ()
    saved_by: tuple[Saving, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_attempt_id(self.attempt)
        check_member_id(self.member)
        _check_after(self.after)
        if self.base:
            check_attempt_id(self.base)


class Manifest(Document, frozen=True, kw_only=True):
    """`manifest-<blake3>.json`: what a committed checkpoint consists of.

    Attributes:
        run: the run's directory below the store's root (informative: a store may be moved).
        name: the checkpoint's name.
        attempt: the attempt that it is.
        base: attempt that it is a revision of, or "".
        generation: of the job that saved it.
        event: what sealed it (`explicit`, `rename`, `dcp-metadata`, `quiescence`, ...).
        format_name: the framework format that was recognised, or "".
        created_at: UTC, RFC 3339.
        members: who took part.
        world_size: None where unknown.
        entries: sorted by path; directories and symlinks are among them.
        saved_by: how it was saved, as its ranks recorded it; absent where none did.
    """

    format: int = FORMAT_VERSION
    run: str
    name: str
    attempt: str
    base: str = ""
    generation: int
    event: str
    format_name: str = ""
    created_at: str
    members: tuple[str, ...]
    world_size: _WorldSize | None = None
    entries: tuple[FileEntry, ...]
    saved_by: SavedBy | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)
        check_attempt_id(self.attempt)
        paths = [entry.path for entry in self.entries]
        if paths != sorted(set(paths)):
            msg = f"manifest of {self.attempt!r} lists paths twice or out of order"
            raise InvalidNameError(msg, subject=self.attempt)
        leaves = {entry.path for entry in self.entries if entry.type is not EntryType.DIR}
        for path in paths:
            # Written through a symlink, a path could leave the checkpoint.
            if path.split("/", 1)[0] == GATEWAY_DIR or not leaves.isdisjoint(parents_of(path)):
                msg = f"manifest of {self.attempt!r} has {path!r} in a place that is no directory"
                raise InvalidNameError(msg, subject=self.attempt)


_D = TypeVar("_D")


class _AnyFormat(msgspec.Struct):
    format: int = FORMAT_VERSION


def encode(document: msgspec.Struct) -> bytes:
    """The canonical bytes of *document*: JSON, sorted keys, one trailing newline."""
    return msgspec.json.encode(document, order="sorted") + b"\n"


def decode(data: bytes, kind: type[_D], *, subject: str) -> _D:
    """The document of type *kind* that *data* is.

    Args:
        data: stored bytes.
        kind: what it must be.
        subject: key or path, named in the error.

    Raises:
        FormatVersionError: written by another format version.
        IntegrityError: torn, edited, or with an illegal name or value.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        msg = (
            f"document has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are possible: {subject}"
        )
        raise IntegrityError(msg, subject=subject)
    if not data.endswith(b"\n"):
        msg = f"torn document (no newline at its end, {len(data)} bytes): {subject}"
        raise IntegrityError(msg, subject=subject)
    try:
        version = msgspec.json.decode(data, type=_AnyFormat).format
        if version != FORMAT_VERSION:
            msg = f"{subject} has format {version}, this ckptgate reads {FORMAT_VERSION}"
            raise FormatVersionError(
                msg, subject=subject, hint="use the ckptgate release that wrote it"
            )
        return msgspec.json.decode(data, type=kind)
    except RecursionError as exc:
        msg = f"document is nested too deeply: {subject}"
        raise IntegrityError(msg, subject=subject) from exc
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidNameError, UsageError) as exc:
        msg = f"document is not valid: {subject}: {exc}"
        raise IntegrityError(msg, subject=subject) from exc


def digest_of(data: bytes) -> Digest:
    """The BLAKE3 digest of *data*."""
    return Digest(blake3.blake3(data).hexdigest())
