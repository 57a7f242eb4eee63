"""The formats that are known, in order of priority, and how they are nested.

Owns which one a set of names belongs to, and that a checkpoint needs what its own format says and
what those say of which it has a part somewhere (a Trainer's directory that holds a DeepSpeed one, a
DCP or an index of shards). A new framework is a module with a `Format` and a line here. No state;
any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from ckptgate.errors import MissingError
from ckptgate.formats import plain_files
from ckptgate.formats.accelerate import Accelerate
from ckptgate.formats.base import CommitEvent, FileOp, Format, Inventory, Part, Tree
from ckptgate.formats.composer import Composer
from ckptgate.formats.dcp import Dcp
from ckptgate.formats.dcp_hf import DcpHf
from ckptgate.formats.deepspeed import DeepSpeed
from ckptgate.formats.hf_trainer import HfTrainer
from ckptgate.formats.layout import Layout
from ckptgate.formats.lightning import Lightning
from ckptgate.formats.megatron import Megatron
from ckptgate.formats.nanotron import Nanotron
from ckptgate.formats.nvrx import Nvrx
from ckptgate.formats.orbax import Orbax
from ckptgate.formats.renamed import Fairseq2, Olmo
from ckptgate.formats.torchsnapshot import TorchSnapshot
from ckptgate.formats.weights import Weights
from ckptgate.model.closure import ExpectedSet

__all__ = [
    "FORMATS",
    "WITHOUT_LATEST",
    "by_name",
    "commit_event",
    "expected",
    "inventory",
    "pointer_event",
    "recognise",
]

_DCP: Final = Dcp()
_DEEPSPEED: Final = DeepSpeed()
_WEIGHTS: Final = Weights()

FORMATS: Final[tuple[Format, ...]] = (
    Orbax(),
    HfTrainer(),
    Accelerate(),
    Lightning(),
    Megatron(),
    _DEEPSPEED,
    TorchSnapshot(),
    Nanotron(),
    Olmo(),
    Fairseq2(),
    Nvrx(),
    Composer(),
    DcpHf(),
    _DCP,
    _WEIGHTS,
)
NESTED: Final[tuple[Format, ...]] = (_DCP, _DEEPSPEED, _WEIGHTS)
"""Those that are found inside of others; each looks for its own in all folders."""


_TELLING: Final = tuple(
    known for known in FORMATS if type(known).commit_event is not Layout.commit_event
)
"""Those with a file that says that a checkpoint is whole."""
WITHOUT_LATEST: Final = frozenset(known.name for known in FORMATS if not known.allows_latest)
"""Beside whose checkpoints the gateway puts no `latest` of its own."""


def recognise(paths: Collection[str], name: str = "") -> Format | None:
    """The format of a checkpoint *name* with files of these paths, None for unknown content."""
    return next((known for known in FORMATS if known.recognise(paths, name)), None)


def commit_event(
    paths: Collection[str], op: FileOp, path: str, old: str, name: str = ""
) -> tuple[Format, CommitEvent] | None:
    """The format and its event if this operation says that no more writes come.

    Args:
        paths: the checkpoint's files now.
        op: what happened.
        path: relative to the checkpoint (after a rename: the new name).
        old: the name before a rename, else "".
        name: the checkpoint's.
    """
    # The event first: it is cheap, and almost every operation is none.
    events = [(known, event) for known in _TELLING if (event := known.commit_event(op, path, old))]
    if not events:
        return None
    format_ = recognise({*paths, path}, name)
    return next(((known, event) for known, event in events if known is format_), None)


def pointer_event(
    paths: Collection[str], pointer: str, name: str
) -> tuple[Format, CommitEvent] | None:
    """The same for a pointer that was set to the checkpoint *name* with these files."""
    if not any(known.pointer_event(pointer) for known in FORMATS):
        return None
    format_ = recognise(paths, name)
    event = None if format_ is None else format_.pointer_event(pointer)
    return None if format_ is None or event is None else (format_, event)


def expected(known: Format, tree: Tree) -> ExpectedSet:
    """What must exist of a checkpoint of that format, with all that is nested in it.

    Raises:
        IntegrityError: what says so is torn or hostile; names the file.
    """
    own = known.expected(tree)
    rest = [part.expected(tree) for part in NESTED if part is not known]
    sets = [own, *(other for other in rest if other.files or other.rank_files)]
    files: dict[str, int] = {}
    for each in sets:
        for path, size in each.files.items():
            files[path] = max(files.get(path, 0), size)
    worlds = [each.world_size for each in sets if each.world_size is not None]
    return ExpectedSet(
        format_name=known.name,
        files=files,
        every_rank=any(each.every_rank for each in sets),
        world_size=own.world_size if own.world_size is not None else max(worlds, default=None),
        source=", ".join(dict.fromkeys(each.source for each in sets if each.source)),
        rank_files=tuple(template for each in sets for template in each.rank_files),
        in_progress=frozenset(path for each in sets for path in each.in_progress),
        edited=frozenset(path for each in sets for path in each.edited),
        is_partial=own.is_partial,
    )


def inventory(known: Format | None, tree: Tree) -> Inventory:
    """Which training state a checkpoint holds, what is nested in it included.

    Args:
        known: its format; None for unknown content, whose files are asked themselves.
        tree: its files.

    Raises:
        IntegrityError: what says so is torn or hostile; names the file.
    """
    if known is None:
        return plain_files.inventory(tree)
    found = [known.inventory(tree)]
    found += [part.inventory(tree) for part in NESTED if part is not known]
    step = next((each.step for each in found if each.step is not None), None)
    ranks: dict[Part, tuple[int, ...]] = {}
    for each in reversed(found):
        ranks |= each.ranks
    return Inventory(parts=_joined(each.parts for each in found), ranks=ranks, step=step)


def _joined(parts: Iterable[Mapping[Part, tuple[str, ...]]]) -> dict[Part, tuple[str, ...]]:
    joined: dict[Part, set[str]] = {}
    for each in parts:
        for part, paths in each.items():
            joined.setdefault(part, set()).update(paths)
    return {part: tuple(sorted(paths)) for part, paths in joined.items()}


def by_name(name: str) -> Format:
    """The format of that name.

    Raises:
        MissingError: none is known, as in a manifest of a newer version.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    msg = f"no such format: {name!r}"
    raise MissingError(msg, subject=name)
