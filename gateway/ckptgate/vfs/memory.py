"""What the vfs remembers while its process lives. Values; `Context.lock` guards the containers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ckptgate.ports.spool import NodeRow
from ckptgate.vfs.openfiles import OpenFiles

__all__ = ["Memory", "Named", "OpenDir"]


@dataclass(slots=True, kw_only=True)
class Named:
    """A name in a listing: its position, node, and how long the kernel may keep it."""

    cookie: int
    name: str
    node: NodeRow
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class OpenDir:
    """An open directory: what it held at its first read, for one caller.

    Attributes:
        fh: handle.
        ino: the directory that was opened.
        is_own_way: the kernel knows it by that number (see `standins`).
        node: what that is for the caller.
        names: what it held, in the order of their positions; None before the first read.
        version: of the spool, before that was read.
    """

    fh: int
    ino: int
    is_own_way: bool = False
    node: NodeRow | None = None
    names: list[Named] | None = None
    version: object = None


@dataclass(slots=True, kw_only=True)
class Memory:
    """State that is lost with the process; everything here can be lost without harm."""

    lookups: dict[int, int] = field(default_factory=dict[int, int])
    files: OpenFiles = field(default_factory=OpenFiles)
    dirs: dict[int, OpenDir] = field(default_factory=dict[int, OpenDir])
    clones: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    """Revision -> node of its base -> its copy."""
    dirs_count: int = 0
    """Directories that were opened so far."""
    writers: dict[int, set[tuple[int, int]]] = field(
        default_factory=dict[int, set[tuple[int, int]]]
    )
    """Attempt -> (pid, start) of its writers."""
    forgotten: int = 0
    """How often what a change had noted was forgotten, as the change was undone."""
    touched: dict[int, float] = field(default_factory=dict[int, float])
    """Attempt -> when its last change was noted, on the monotonic clock."""
    callers: dict[str, set[tuple[int, int]]] = field(
        default_factory=dict[str, set[tuple[int, int]]]
    )
    """Shared job key -> (pid, start) of processes that used the mount."""
    moments: dict[object, float] = field(default_factory=dict[object, float])
    """When something was last asked of the store, on the monotonic clock."""
    moving: OrderedDict[tuple[int, str], set[int]] = field(
        default_factory=OrderedDict[tuple[int, str], set[int]]
    )
    """(directory, name) that the kernel may not keep -> pids about to change it."""
    begun: OrderedDict[tuple[int, int], tuple[float, int]] = field(
        default_factory=OrderedDict[tuple[int, int], tuple[float, int]]
    )
    replaced: OrderedDict[tuple[int, int], float] = field(
        default_factory=OrderedDict[tuple[int, int], float]
    )
    """(pid, node) -> when it was told to look again; both: see `looking_again`."""
    is_spool_full: bool = False
    """As `vfs.room` last saw it."""
    roomy: set[int] = field(default_factory=set[int])
    """Attempts that have the room they are likely to need, or waited for it."""
    synced: set[int] = field(default_factory=set[int])
    """Files whose name in the spool's directory is durable."""
    is_inherited: bool = False
    """The kernel knows nodes from before this process, which nobody counted here."""
    resumed: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    listings: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    wholeness: dict[int, tuple[int, bool]] = field(default_factory=dict[int, tuple[int, bool]])
