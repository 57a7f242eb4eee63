"""PyTorch distributed checkpoints (DCP): `.metadata` and `__<rank>_<n>.distcp`.

Owns what DCP's own files say must exist, in any folder of any checkpoint. `.metadata` is a pickle;
it is read as inert values only, and may name nothing but what DCP writes there. The commit event is
the arrival of `.metadata` at the top: rank 0 writes it after it has heard of every rank's writes. A
nested one (`model/.metadata`) is no event: others may follow it. torchtitan's, Composer's sharded
and ByteCheckpoint's checkpoints are such ones; the last names its own by a tracker, once every rank
is done. Kept are the last few metadata that were read, by their bytes: the set is asked for again
with each vote, and reading one takes as long as thousands of names do. Any thread.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, cast

from ckptgate.errors import IntegrityError, InvalidNameError
from ckptgate.formats.base import (
    CommitEvent,
    FileOp,
    FileView,
    Inventory,
    Part,
    Tree,
    read_exact,
)
from ckptgate.formats.inert import MAX_PICKLE_BYTES, Inert, Pairs, read_inert
from ckptgate.formats.layout import Layout
from ckptgate.formats.naming import below
from ckptgate.model.closure import ExpectedSet
from ckptgate.model.ids import check_relative_path

__all__ = ["COMMIT_EVENT", "METADATA", "TRACKER", "Dcp", "DcpMetadata", "read_metadata"]

METADATA: Final = ".metadata"
COMMIT_EVENT: Final = "dcp-metadata"
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's and ByteCheckpoint's pointer."""
_SHARD = re.compile(r"(?:(.+)/)?__\d+_\d+\.distcp")
_METADATA = re.compile(r"(?:(.+)/)?\.metadata")
_RANK_METADATA = re.compile(r"(?:(.+)/)?__\d+\.metadata")

# Which state a stored name belongs to, by a word in it; the first that fits.
_PARTS: Final[tuple[tuple[Part, re.Pattern[str]], ...]] = (
    ("scheduler", re.compile(r"(?:.*\.)?\w*scheduler.*")),
    ("scaler", re.compile(r"(?:.*\.)?(?:grad_)?scaler(?:\..*)?")),
    ("rng", re.compile(r"(?:.*[./])?rng.*")),
    ("data", re.compile(r"(?:.*\.)?(?:dataloader|sampler|dataset)\w*(?:\..*)?")),
    ("optimizer", re.compile(r"(?:.*\.)?optim(?:izer)?\w*(?:\..*)?")),
    ("trainer", re.compile(r"train_state.*|common_state|step|epoch|iteration|(?:.*\.)?loops\..*")),
)

# By pattern, as new releases move classes about; nothing of it is ever resolved.
_MODULES = re.compile(
    r"torch(\.(distributed|serialization|storage|_utils|_tensor)(\.\w+)*)?"
    r"|megatron\.core(\.\w+)*|collections|pathlib(\._local)?|_codecs"
)
_BUILTINS: Final = frozenset(
    {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list"}
    | {"object", "set", "slice", "str", "tuple"}
)
_STORAGE_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MAX_OFFSET: Final = 1 << 62
RECENT_MAX: Final = 4
"""Metadata that are kept as they were read (a ByteCheckpoint has three)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """What a `.metadata` says of files.

    Attributes:
        files: path relative to the metadata's directory -> bytes that it must have at least.
        world_size: where every rank's plan is attached, else None.
        keys: names of what is stored.
        is_megatron: Megatron-core wrote it.
    """

    files: Mapping[str, int]
    world_size: int | None
    keys: tuple[str, ...] = ()
    is_megatron: bool = False


class Dcp(Layout):
    """The format as `base.Format`."""

    name = "dcp"
    # At the top or one level below; as a part of others it may lie anywhere.
    own: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:[^/]+/)?(?:\.metadata|__\d+\.metadata|__\d+_\d+\.distcp)"
    )

    def commit_event(self, op: FileOp, path: str, old: str) -> CommitEvent | None:
        """`.metadata` got its name, or was written under it directly."""
        is_event = path == METADATA and (op == "close" or old != METADATA)
        return CommitEvent(name=COMMIT_EVENT) if is_event else None

    def pointer_event(self, pointer: str) -> CommitEvent | None:
        """The tracker is written, by rank 0 after all ranks were done."""
        return CommitEvent(name="tracker") if pointer == TRACKER else None

    def expected(self, tree: Tree) -> ExpectedSet:
        """Every file that a metadata refers to, and the metadata files themselves.

        A directory with shards and without any metadata expects its `.metadata`. Shards that no
        metadata refers to may be there (a rank with nothing to write makes an empty one).

        Raises:
            IntegrityError: a metadata is torn or hostile.
        """
        files: dict[str, int] = {}
        sizes = tree.files()
        worlds: set[int] = set()
        is_collective = True
        for folder, metadata in sorted(_folders(sizes).items()):
            if _is_another_s(tree, folder, metadata):
                continue
            if not metadata:
                files[below(folder, METADATA)] = 1
            is_collective = is_collective and METADATA in (metadata or {METADATA})
            for name in sorted(metadata):
                path = below(folder, name)
                said = read_metadata(tree.open(path), path)
                files[path] = sizes[path]
                for relative, size in said.files.items():
                    full = below(folder, relative)
                    files[full] = max(files.get(full, 0), size)
                if said.world_size is not None:
                    worlds.add(said.world_size)
        return ExpectedSet(
            format_name=self.name,
            files=files,
            # Without a common metadata only the ranks themselves tell how many there are.
            every_rank=not is_collective,
            world_size=max(worlds, default=None),
            source=", ".join(sorted(path for path in files if path.endswith(METADATA))[:3]),
        )

    def inventory(self, tree: Tree) -> Inventory:
        """By the names of what is stored; the files that hold it are the metadata.

        Raises:
            IntegrityError: a metadata is torn or hostile.
        """
        found: dict[Part, set[str]] = {}
        for folder, metadata in _folders(tree.files()).items():
            for name in metadata:
                path = below(folder, name)
                for key in read_metadata(tree.open(path), path).keys:
                    whole = f"{folder}.{key}" if folder else key
                    found.setdefault(_part_of(whole), set()).add(path)
        return Inventory(parts={part: tuple(sorted(paths)) for part, paths in found.items()})


def _folders(paths: Collection[str]) -> dict[str, set[str]]:
    """Each directory of a DCP ("" the top), and the names of the metadata that count in it."""
    folders: dict[str, set[str]] = {}
    of_ranks: dict[str, set[str]] = {}
    for path in paths:
        if found := _METADATA.fullmatch(path):
            folders.setdefault(found[1] or "", set()).add(METADATA)
        elif found := _RANK_METADATA.fullmatch(path):
            of_ranks.setdefault(found[1] or "", set()).add(path.rpartition("/")[2])
        elif found := _SHARD.fullmatch(path):
            folders.setdefault(found[1] or "", set())
    for folder, names in of_ranks.items():
        # As DCP reads it: the common metadata, and only without it those of the ranks.
        if not folders.setdefault(folder, set()):
            folders[folder] = names
    return folders


def _part_of(key: str) -> Part:
    for part, words in _PARTS:
        if words.fullmatch(key):
            return part
    return "model"


def _is_another_s(tree: Tree, folder: str, metadata: Collection[str]) -> bool:
    """Whether a `.metadata` somewhere below, without any shard, is no pickle at all."""
    if not folder or set(metadata) != {METADATA}:
        return False
    has_shard = any(
        (found := _SHARD.fullmatch(path)) and found[1] == folder for path in tree.files()
    )
    return not has_shard and tree.open(below(folder, METADATA)).read(0, 1) != b"\x80"


def read_metadata(view: FileView, path: str) -> DcpMetadata:
    """What the metadata file *path* says; nothing in it is executed.

    Raises:
        IntegrityError: torn, hostile, not a metadata, or it names a path outside.
    """
    if view.size > MAX_PICKLE_BYTES:
        msg = f"metadata {path} has {view.size} bytes, limit {MAX_PICKLE_BYTES}"
        raise IntegrityError(msg, subject=path)
    data = read_exact(view, 0, view.size, f"metadata {path}")
    return _read_once(_Pickled(data), path)


class _Pickled:
    """A metadata's bytes, which are told by their digest once they were read."""

    __slots__ = ("_digest", "_left")

    def __init__(self, data: bytes) -> None:
        self._digest = hashlib.blake2b(data, digest_size=32).digest()
        self._left = data

    def take(self) -> bytes:
        """The bytes; they aren't kept."""
        data, self._left = self._left, b""
        return data

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pickled) and other._digest == self._digest


@functools.lru_cache(maxsize=RECENT_MAX)
def _read_once(pickled: _Pickled, path: str) -> DcpMetadata:
    return _read(pickled.take(), path)


def _read(data: bytes, path: str) -> DcpMetadata:
    value = read_inert(data, is_allowed=_is_allowed, is_kept=_is_kept, subject=path)
    if not isinstance(value, Inert) or not value.name.endswith("Metadata"):
        msg = f"metadata {path} does not hold a Metadata object"
        raise IntegrityError(msg, subject=path)
    storage = value.field("storage_data")
    if not isinstance(storage, Pairs):
        msg = f"metadata {path} has no storage_data"
        raise IntegrityError(msg, subject=path)
    files: dict[str, int] = {}
    for relative, end in _stored(storage, path):
        files[relative] = max(files.get(relative, 0), end)
    plans = value.field("all_local_plans")
    world = len(cast("list[object]", plans)) if isinstance(plans, list) and plans else None
    state = value.field("state_dict_metadata")
    keys = (
        tuple(key for key, _ in state if isinstance(key, str)) if isinstance(state, Pairs) else ()
    )
    is_megatron = value.name.endswith("MCoreMetadata")
    return DcpMetadata(files=files, world_size=world, keys=keys, is_megatron=is_megatron)


def _stored(storage: Pairs, path: str) -> Iterator[tuple[str, int]]:
    """Path and end of every piece that is stored."""
    checked: set[str] = set()
    for _, info in storage:
        if not isinstance(info, Inert) or info.name != _STORAGE_INFO:
            msg = f"metadata {path} stores something that is no _StorageInfo"
            raise IntegrityError(msg, subject=path)
        relative, offset, length = (
            info.field(key) for key in ("relative_path", "offset", "length")
        )
        if not isinstance(relative, str) or not _is_size(offset) or not _is_size(length):
            msg = f"metadata {path} has a _StorageInfo without path, offset or length"
            raise IntegrityError(msg, subject=path)
        if relative not in checked:
            try:
                checked.add(check_relative_path(relative))
            except InvalidNameError as exc:
                msg = f"metadata {path} refers to {relative[:80]!r}, outside of the checkpoint"
                raise IntegrityError(msg, subject=path) from exc
        yield relative, cast("int", offset) + cast("int", length)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_OFFSET


def _is_allowed(module: str, name: str) -> bool:
    if module in {"builtins", "__builtin__"}:
        return name in _BUILTINS
    return bool(_MODULES.fullmatch(module)) and all(part.isidentifier() for part in name.split("."))


def _is_kept(name: str) -> bool:
    return name == _STORAGE_INFO or name.endswith((".Metadata", "MCoreMetadata"))
