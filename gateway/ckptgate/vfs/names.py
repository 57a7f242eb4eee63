"""Names and paths in the mount: what may be created where, and what kind a name is there.

Owns the rule that nothing below a hidden directory is a checkpoint, pointer or whole file, and that
`.ckptgate` belongs to the gateway alone. Any thread.
"""

from __future__ import annotations

import errno

from ckptgate.errors import InvalidNameError, RefusedError
from ckptgate.model.documents import EntryType, FileEntry
from ckptgate.model.ids import (
    MAX_NAME_BYTES,
    check_checkpoint_name,
    check_name,
    check_relative_path,
)
from ckptgate.model.layout import GATEWAY_DIR, TEMP_PREFIX, join_key
from ckptgate.ports.spool import ROOT_INO, NodeKind, NodeRow
from ckptgate.vfs.context import Context, stale

__all__ = [
    "can_be",
    "check_length",
    "check_new_name",
    "check_symlink",
    "check_symlinks_below",
    "is_checkpoint",
    "is_pointer",
    "is_special",
    "is_whole",
    "path_in_attempt",
    "plain_path",
]


def plain_path(parent: NodeRow, name: str) -> str:
    """Store path of a name in a plain directory."""
    return join_key(parent.plain_path or "", name)


def _is_hidden(parent: NodeRow) -> bool:
    return any(part.startswith(".") for part in (parent.plain_path or "").split("/"))


def is_checkpoint(ctx: Context, parent: NodeRow, name: str) -> bool:
    """Whether a directory of that name would be a checkpoint here."""
    return parent.attempt is None and ctx.patterns.is_checkpoint(name) and not _is_hidden(parent)


def is_pointer(ctx: Context, parent: NodeRow, name: str) -> bool:
    """Whether a symlink or small text of that name may be a pointer here."""
    return parent.attempt is None and ctx.patterns.is_pointer(name) and not _is_hidden(parent)


def is_whole(ctx: Context, parent: NodeRow, name: str) -> bool:
    """Whether a file of that name is published whole here."""
    return parent.attempt is None and ctx.patterns.is_whole(name) and not _is_hidden(parent)


def is_special(ctx: Context, parent: NodeRow, name: str) -> bool:
    """Whether what the name means here can depend on who asks."""
    return (
        is_checkpoint(ctx, parent, name)
        or is_pointer(ctx, parent, name)
        or is_whole(ctx, parent, name)
    )


def path_in_attempt(ctx: Context, ino: int) -> str:
    """Path of a node of an attempt below the attempt's root, "" for the root itself."""
    parts: list[str] = []
    while (place := ctx.spool.place(ino)) is not None:
        ino = place[0]
        parts.append(place[1])
    return "/".join(reversed(parts))


def can_be(path: str) -> bool:
    """Whether the store can have such a path at all."""
    try:
        check_relative_path(path)
    except InvalidNameError:
        return False
    return True


def check_length(name: str) -> None:
    """Refuse to look for what no name can be.

    Raises:
        InvalidNameError: ENAMETOOLONG.
    """
    if 4 * len(name) > MAX_NAME_BYTES and len(name.encode()) > MAX_NAME_BYTES:
        msg = f"a name has at most {MAX_NAME_BYTES} bytes: {name!r}"
        raise InvalidNameError(msg, subject=name, errno_value=errno.ENAMETOOLONG)


def check_new_name(ctx: Context, parent: NodeRow, name: str, *, is_attempt: bool = False) -> None:
    """Refuse a name that can't be stored under *parent*.

    Raises:
        InvalidNameError: with EILSEQ, ENAMETOOLONG or EINVAL.
        RefusedError: EACCES for the gateway's own names.
    """
    if name == GATEWAY_DIR:
        msg = f"{GATEWAY_DIR!r} is the gateway's own directory, nothing may be created there"
        raise RefusedError(msg, subject=name, errno_value=errno.EACCES)
    if name.startswith(TEMP_PREFIX):
        msg = f"names that begin with {TEMP_PREFIX!r} are the gateway's own"
        raise RefusedError(msg, subject=name, errno_value=errno.EACCES)
    if is_attempt:
        check_checkpoint_name(name)
    else:
        check_name(name)
    if parent.attempt is None:
        check_relative_path(plain_path(parent, name))
    elif above := path_in_attempt(ctx, parent.ino):
        check_relative_path(f"{above}/{name}")
    if parent.ino != ROOT_INO and parent.attempt is None and ctx.spool.place(parent.ino) is None:
        raise stale(name, "its directory was removed")


def check_symlinks_below(ctx: Context, directory: NodeRow, path: str) -> None:
    """Refuse to give *directory* the path *path* if a symlink below it would lead out then."""
    for name, child in ctx.spool.children(directory.ino):
        if child.kind is NodeKind.SYMLINK:
            check_symlink(join_key(path, name), child.target)
        elif child.kind is NodeKind.DIR:
            check_symlinks_below(ctx, child, join_key(path, name))


def check_symlink(path: str, target: str) -> None:
    """Refuse a symlink that would lead out of its checkpoint: the store could not hold it."""
    try:
        FileEntry(path=path, type=EntryType.SYMLINK, mode=0o777, mtime_ns=0, target=target)
    except InvalidNameError as exc:
        raise RefusedError(
            str(exc), subject=path, hint="copy the file into the checkpoint instead"
        ) from exc
