"""PyTorch distributed checkpoints (DCP): `.metadata` and `__<rank>_<n>.distcp`.

Owns what DCP's own files say must exist. `.metadata` is a pickle; it is read as inert values only,
and may name nothing but what DCP writes there. The commit event is the arrival of `.metadata` at
the top: rank 0 writes it after it has heard of every rank's writes. One nested level is read for
the expected set (`model/.metadata`), but is no event: others may follow it. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, cast

from ckptgate.errors import IntegrityError, InvalidNameError
from ckptgate.formats.base import FileOp, FileView, Tree, read_exact
from ckptgate.formats.inert import MAX_PICKLE_BYTES, Inert, Pairs, read_inert
from ckptgate.model.closure import ExpectedSet
from ckptgate.model.ids import check_relative_path

__all__ = ["COMMIT_EVENT", "METADATA", "Dcp", "DcpMetadata", "read_metadata"]

METADATA: Final = ".metadata"
COMMIT_EVENT: Final = "dcp-metadata"
_SHARD = re.compile(r"(?:([^/]+)/)?__\d+_\d+\.distcp")
_METADATA = re.compile(r"(?:([^/]+)/)?\.metadata")
_RANK_METADATA = re.compile(r"(?:([^/]+)/)?__\d+\.metadata")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """What a `.metadata` says of files.

    Attributes:
        files: path relative to the metadata's directory -> bytes that it must have at least.
        world_size: where every rank's plan is attached, else None.
    """

    files: dict[str, int]
    world_size: int | None


class Dcp:
    """The format as `base.Format`."""

    @property
    def name(self) -> str:
        """Stable; stands in manifests."""
        return "dcp"

    def recognise(self, paths: Collection[str]) -> bool:
        """Any metadata or shard of DCP, at the top or one level below."""
        return any(
            _METADATA.fullmatch(path) or _SHARD.fullmatch(path) or _RANK_METADATA.fullmatch(path)
            for path in paths
        )

    def commit_event(self, op: FileOp, path: str, old: str) -> str:
        """`.metadata` got its name, or was written under it directly."""
        is_event = path == METADATA and (op == "close" or old != METADATA)
        return COMMIT_EVENT if is_event else ""

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
            if not metadata:
                files[_below(folder, METADATA)] = 1
            is_collective = is_collective and METADATA in (metadata or {METADATA})
            for name in sorted(metadata):
                path = _below(folder, name)
                said = read_metadata(tree.open(path), path)
                files[path] = sizes[path]
                for relative, size in said.files.items():
                    full = _below(folder, relative)
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


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def read_metadata(view: FileView, path: str) -> DcpMetadata:
    """What the metadata file *path* says; nothing in it is executed.

    Raises:
        IntegrityError: torn, hostile, not a metadata, or it names a path outside.
    """
    if view.size > MAX_PICKLE_BYTES:
        msg = f"metadata {path} has {view.size} bytes, limit {MAX_PICKLE_BYTES}"
        raise IntegrityError(msg, subject=path)
    data = read_exact(view, 0, view.size, f"metadata {path}")
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
    return DcpMetadata(files=files, world_size=world)


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
