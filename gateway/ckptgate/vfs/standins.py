"""Stand-ins: by which number the kernel knows a directory that can be reached by two ways.

Owns the rule: to the kernel a directory has one place. A revision's directories are found below
the revision's root, and below the committed checkpoint's directories too, which processes of the
revising job have open. Would both ways give one number, the kernel had to move the directory to and
fro, and says ESTALE of its own while somebody else holds one of the two (`d_splice_alias`). So on
the way through a committed directory it gets another number for each level below that. Values only.
"""

from __future__ import annotations

from typing import Final

from ckptgate.ports.spool import NodeKind, NodeRow

__all__ = ["below", "node_of"]

_LEVEL_SHIFT: Final = 40
"""Nodes have smaller numbers: those of open directories leave them no more either."""
_LEVEL_MAX: Final = (1 << 20) - 1
_NODE_MASK: Final = (1 << _LEVEL_SHIFT) - 1


def node_of(number: int) -> int:
    """The node that the kernel means by *number*."""
    return number & _NODE_MASK


def below(number: int, parent: NodeRow, child: NodeRow) -> int:
    """By which number the kernel is to know *child*.

    Args:
        number: by which it knows the directory in which the child was found.
        parent: what that directory is for the caller.
        child: what was found.
    """
    level = number >> _LEVEL_SHIFT
    is_own_way = not level and parent.ino == number
    if is_own_way or child.kind is not NodeKind.DIR:
        return child.ino
    return child.ino | min(level + 1, _LEVEL_MAX) << _LEVEL_SHIFT
