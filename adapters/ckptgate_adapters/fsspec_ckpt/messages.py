"""The requests and replies of `ckpt://`, strictly typed. Values only."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

__all__ = [
    "HELD_AT_ONCE",
    "PART_PREFIX",
    "READ_BYTES_MAX",
    "VERSION",
    "Close",
    "Ensure",
    "Facts",
    "Failed",
    "GetXattr",
    "GiveUp",
    "Hello",
    "Hold",
    "List",
    "Mkdir",
    "Name",
    "Open",
    "Ping",
    "Read",
    "Remove",
    "Rename",
    "Reopen",
    "Reply",
    "Request",
    "SetAttrs",
    "SetXattr",
    "Stat",
    "Sync",
    "Told",
    "Unhold",
    "Wait",
    "WaitStored",
]

VERSION: Final = 2
HELD_AT_ONCE: Final = 8192
"""Handles in one packet of a hello: so many fit, however large their numbers are."""
READ_BYTES_MAX: Final = 16 << 20
"""Of a file that only the store has, at a time."""
PART_PREFIX: Final = ".ckpt-part-"
"""Names of new versions, beside the file whose place they take when they are closed."""


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What all messages have in common."""


class Hello(_Message, tag="hello", kw_only=True, frozen=True):
    """The first request of a connection: in several packets where more is held than one takes.

    Attributes:
        version: of the protocol.
        session: random, the same on all connections of one client.
        rank, world_size: of its process, where it knows them better than its environment tells.
        job: job key as text, "" for the one that its environment tells.
        held: handles that it has open, from before the daemon was started again.
        has_more: another packet follows, the same but for its handles.
    """

    version: int
    session: str
    rank: int | None = None
    world_size: int | None = None
    job: str = ""
    held: tuple[int, ...] = ()
    has_more: bool = False


class _Change(_Message, kw_only=True, frozen=True):
    """A request that must be done once.

    Attributes:
        id: the same when it is sent again, and no other request's.
        is_again: the client got no reply to the first sending.
    """

    id: int
    is_again: bool = False


class Ping(_Message, tag="ping", kw_only=True, frozen=True):
    """Nothing is asked: the client is there."""


class Stat(_Message, tag="stat", kw_only=True, frozen=True):
    """Attributes of what a path means; *is_followed*: of a symlink's target."""

    path: str
    is_followed: bool = True


class List(_Message, tag="list", kw_only=True, frozen=True):
    """What a directory holds, with attributes."""

    path: str


class Open(_Change, tag="open", kw_only=True, frozen=True):
    """Open a file: `flags` as of open(2); the reply has its descriptor.

    With O_TRUNC, or O_CREAT alone, nobody but its job sees what is written before its close.
    """

    path: str
    flags: int
    mode: int = 0o666


class Close(_Change, tag="close", kw_only=True, frozen=True):
    """The file is written: it counts from now on.

    Attributes:
        fh: its handle.
        path: its name.
        part: the name under which it was written, "" where that is its own.
        is_synced: on return it survives a power loss of this node.
    """

    fh: int
    path: str = ""
    part: str = ""
    is_synced: bool = False


class GiveUp(_Message, tag="give-up", kw_only=True, frozen=True):
    """What was written is not wanted; *is_removed*: the file was made by its open."""

    fh: int
    is_removed: bool = False


class Reopen(_Message, tag="reopen", kw_only=True, frozen=True):
    """The present descriptor of a handle's bytes."""

    fh: int


class Ensure(_Message, tag="ensure", kw_only=True, frozen=True):
    """Have a range verified in the spool file of a handle that isn't complete."""

    fh: int
    offset: int
    length: int


class Read(_Message, tag="read", kw_only=True, frozen=True):
    """Bytes of a file that only the store has: they come in the reply, or in a descriptor."""

    fh: int
    offset: int
    length: int


class Sync(_Message, tag="sync", kw_only=True, frozen=True):
    """fsync of a handle."""

    fh: int


class Mkdir(_Change, tag="mkdir", kw_only=True, frozen=True):
    """Make a directory."""

    path: str
    mode: int = 0o777


class Remove(_Change, tag="remove", kw_only=True, frozen=True):
    """Remove a file or symlink, or an empty directory."""

    path: str
    is_dir: bool = False


class Rename(_Change, tag="rename", kw_only=True, frozen=True):
    """Rename; `flags` as of renameat2(2)."""

    path: str
    to: str
    flags: int = 0


class SetAttrs(_Change, tag="set-attrs", kw_only=True, frozen=True):
    """Change attributes; None leaves as is."""

    path: str
    mode: int | None = None
    mtime_ns: int | None = None
    size: int | None = None


class Hold(_Message, tag="hold", kw_only=True, frozen=True):
    """Know a directory whatever becomes of its name; the reply has a number for it."""

    path: str


class Unhold(_Message, tag="unhold", kw_only=True, frozen=True):
    """It is not held any longer."""

    held: int


class GetXattr(_Message, tag="get-xattr", kw_only=True, frozen=True):
    """An extended attribute of a path, or of what is held by a number."""

    name: str
    path: str = ""
    held: int = 0


class SetXattr(_Change, tag="set-xattr", kw_only=True, frozen=True):
    """Set an extended attribute, as `GetXattr`."""

    name: str
    value: bytes
    path: str = ""
    held: int = 0


class Wait(_Message, tag="wait", kw_only=True, frozen=True):
    """Wait until a checkpoint is decided; the reply has its state, however it is then."""

    path: str
    timeout_s: float | None = None


class WaitStored(_Message, tag="wait-stored", kw_only=True, frozen=True):
    """Wait until the store has the present bytes of a file, verified."""

    path: str
    timeout_s: float


Request: TypeAlias = (
    Hello
    | Ping
    | Stat
    | List
    | Open
    | Close
    | GiveUp
    | Reopen
    | Ensure
    | Read
    | Sync
    | Mkdir
    | Remove
    | Rename
    | SetAttrs
    | Hold
    | Unhold
    | GetXattr
    | SetXattr
    | Wait
    | WaitStored
)


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Attributes: `kind` is "file", "dir" or "symlink"; times in ns."""

    kind: str
    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Name(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a listing; `target` is a symlink's, `facts` are those of what it leads to."""

    name: str
    facts: Facts
    target: str = ""


class Told(_Message, tag="told", kw_only=True, frozen=True):
    """It was done.

    Attributes:
        facts: of a path or an opened file.
        target: of a symlink.
        fh: an opened file's handle.
        part: the name under which it is written, "" where that is its own.
        is_new: the open made it.
        is_complete: all bytes are in the descriptor's file.
        spool_ino: inode number of a handle's spool file.
        names: of a listing.
        data: bytes.
        has_data: they are in the descriptor instead.
        text: a state as JSON, or the daemon's epoch.
        has_more: another packet follows.
        ping_s: of a hello: a client with open files is to say so often that it is there; 0: the
            daemon sees that by itself.
    """

    facts: Facts | None = None
    target: str = ""
    fh: int = 0
    part: str = ""
    is_new: bool = False
    is_complete: bool = True
    spool_ino: int = 0
    names: tuple[Name, ...] = ()
    data: bytes = b""
    has_data: bool = False
    text: str = ""
    has_more: bool = False
    ping_s: float = 0.0


class Failed(_Message, tag="failed", kw_only=True, frozen=True):
    """It was not done: an error's parts."""

    errno: int
    kind: str
    message: str
    subject: str = ""
    hint: str = ""


Reply: TypeAlias = Told | Failed
