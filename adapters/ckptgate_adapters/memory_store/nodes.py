"""The tree of nodes that the store in memory is, as on a disk. Who changes it holds its lock."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import ExistsError, MissingError, UnusableError
from ckptgate.model.layout import GATEWAY_DIR, join_key
from ckptgate.ports.store import PlainEntry, PlainKind

__all__ = ["MANIFEST", "Node", "Nodes"]

MANIFEST: Final = f"{GATEWAY_DIR}/manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What is under a key."""

    kind: PlainKind
    data: bytes = b""
    target: str = ""
    mode: int = 0o644
    mtime_ns: int = 0
    uid: int = 0
    gid: int = 0


class Nodes:
    """Nodes by their keys."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._nodes: dict[str, Node] = {}
        self._moves = 0

    def _add(self, key: str, node: Node) -> None:
        """Put *node* at *key*, making its parents; a directory is never replaced by a file."""
        there = self._nodes.get(key)
        if there is not None and PlainKind.DIR in {there.kind, node.kind} and there != node:
            msg = f"a {there.kind} is already stored under {key!r}"
            raise ExistsError(msg, subject=key, errno_value=errno.EISDIR)
        parent = key
        while parent := parent.rpartition("/")[0]:
            above = self._nodes.setdefault(parent, Node(kind=PlainKind.DIR, mode=0o755))
            if above.kind is not PlainKind.DIR:
                msg = f"{parent!r} is not a directory"
                raise UnusableError(msg, subject=key, errno_value=errno.ENOTDIR)
        self._nodes[key] = node

    def _node(self, key: str) -> Node:
        try:
            return self._nodes[key]
        except KeyError:
            msg = f"nothing is stored under {key!r}"
            raise MissingError(msg, subject=key) from None

    def _file(self, key: str) -> Node:
        with self._lock:
            node = self._node(key)
        if node.kind is not PlainKind.FILE:
            msg = f"not a regular file: {key!r}"
            raise UnusableError(msg, subject=key)
        return node

    def _names(self, prefix: str) -> list[str]:
        start = f"{prefix}/" if prefix else ""
        rest = (key[len(start) :] for key in self._nodes if key.startswith(start))
        return sorted(name for name in rest if "/" not in name)

    def _move(self, old: str, new: str) -> None:
        keys = [key for key in self._nodes if key == old or key.startswith(f"{old}/")]
        moved = {new + key[len(old) :]: self._nodes.pop(key) for key in keys}
        self._nodes.pop(new, None)
        for key, node in moved.items():
            self._add(key, node)

    def _check_replace(self, new: str) -> None:
        if self._names(new):
            msg = f"cannot rename to {new!r}: it is not empty"
            raise ExistsError(msg, subject=new, errno_value=errno.ENOTEMPTY)

    def _fresh(self, prefix: str, start: str) -> str:
        self._moves += 1
        return join_key(prefix, f"{start}{self._moves:08x}")

    def _entry(self, path: str, node: Node) -> PlainEntry:
        is_dir = node.kind is PlainKind.DIR
        is_managed = is_dir and join_key(path, MANIFEST) in self._nodes
        return PlainEntry(
            name=path.rpartition("/")[2],
            kind=node.kind,
            size=len(node.data) if node.kind is PlainKind.FILE else len(node.target),
            mode=node.mode,
            mtime_ns=node.mtime_ns,
            uid=node.uid,
            gid=node.gid,
            target=node.target,
            is_managed=is_managed,
            has_runs=is_dir and not is_managed and join_key(path, GATEWAY_DIR) in self._nodes,
        )
