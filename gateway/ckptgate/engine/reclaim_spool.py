"""Reclaiming in the spool: what was given up or replaced, and what a crash left over.

It owns the rules: a decided attempt's rows and bytes go after their grace, once nobody has a file
of it open and nobody revises it; given-up ones are evidence and have a grace of their own. What is
undecided or committed is never touched here. Each transaction is short and leaves a tree that the
next round goes on with; the attempt's row goes last.

Thread rule: one thread at a time; `Reclaimer` guards it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Final

from ckptgate.engine.node import Node
from ckptgate.engine.sightings import Graces, Reclaimed, Sightings
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.spool import AttemptRow, NodeRow

__all__ = ["SpoolReclaimer"]

_log = logging.getLogger(__name__)

PIECE: Final = 128
"""Nodes that go in one transaction: the mount's changes wait for its end."""
_BLOCK_BYTES: Final = 512
_GIVEN_UP: Final = frozenset({AttemptState.ABORTED, AttemptState.ABANDONED})
_DEAD: Final = (AttemptState.ABORTED, AttemptState.ABANDONED, AttemptState.REPLACED)


class SpoolReclaimer:
    """Reclaims this node's spool."""

    def __init__(self, node: Node) -> None:
        self._spool = node.spool
        self._logs = node.logs
        self._invalidations = node.invalidations
        self._sightings = Sightings(node.spool, node.clock, "spool")

    def round(
        self, graces: Graces, *, run: str | None = None, is_dry: bool = False
    ) -> Iterator[Reclaimed]:
        """One round; yields after each bounded piece of work what that was.

        Args:
            graces: how long what is dead is kept.
            run: only this one's attempts; None for everything, left-overs of crashes too.
            is_dry: change nothing, say what would go.
        """
        self._sightings.begin_round()
        if run is None:
            # First: the bytes of what this round drops may go a moment after their rows.
            yield from self._drop_strays(is_dry=is_dry)
        for row in self._spool.attempts(states=_DEAD):
            age_s = self._sightings.age_s(f"row:{row.id}", str(row.state))
            is_given_up = row.state in _GIVEN_UP
            grace_s = max(graces.evidence_s, graces.grace_s) if is_given_up else graces.grace_s
            if (run is None or row.run == run) and age_s >= grace_s and self._may_go(row):
                yield from self._drop(row, is_dry=is_dry)
        if run is None:
            yield from self._drop_unreferenced(graces, is_dry=is_dry)
            self._sightings.end_round()
        else:
            self._sightings.save()

    def _may_go(self, row: AttemptRow) -> bool:
        if self._logs.get(row.run).look(lambda state: state.is_held):
            return False
        revisers = self._spool.attempts(run=row.run, states=UNDECIDED)
        if any(other.base == row.id for other in revisers):
            return False
        return not self._spool.handles_of_attempt(row.id)

    def _drop(self, row: AttemptRow, *, is_dry: bool) -> Iterator[Reclaimed]:
        what = row.attempt or row.name
        tree = self._spool.tree(row.id)
        if is_dry:
            size = sum(self._bytes_of(node) for _, node in tree)
            count = sum(node.file is not None for _, node in tree)
            yield Reclaimed(
                place="spool", run=row.run, what=what, why=str(row.state), count=count, size=size
            )
            return
        nodes = [node for _, node in reversed(tree)]
        for start in range(0, max(1, len(nodes)), PIECE):
            done = Reclaimed(place="spool", run=row.run, what=what, why=str(row.state))
            if not self._drop_piece(row, nodes[start : start + PIECE], done):
                return
            yield done
        self._drop_row(row)
        _log.info("reclaimed run=%s attempt=%s state=%s", row.run, what, row.state)

    def _drop_piece(self, row: AttemptRow, nodes: list[NodeRow], done: Reclaimed) -> bool:
        """Drop some nodes with their names, children first; False if somebody uses one by now."""
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is None or now.state is not row.state or not self._may_go(now):
                return False
            for node in nodes:
                place = self._spool.place(node.ino)
                if place is not None:
                    self._spool.unlink(*place)
                self._spool.drop_node(node.ino)
                if node.file is None or self._spool.nodes_of_file(node.file):
                    continue
                if not self._spool.handles(file=node.file):
                    done.size += self._bytes_of(node)
                    done.count += 1
                    self._spool.drop_file(node.file)
        return True

    def _drop_row(self, row: AttemptRow) -> None:
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is None or now.state is not row.state or self._spool.count_children(now.root)[0]:
                return
            self._spool.drop_attempt(row.id)
            self._spool.drop_node(now.root)
        self._invalidations.name(row.run_ino, row.name)

    def _bytes_of(self, node: NodeRow) -> int:
        """Bytes that the node's spool file alone holds."""
        if node.file is None or len(self._spool.nodes_of_file(node.file)) > 1:
            return 0
        try:
            seen = os.stat(self._spool.data_path(node.file), follow_symlinks=False)
        except OSError:
            return 0
        return seen.st_blocks * _BLOCK_BYTES if seen.st_nlink == 1 else 0

    # What a crash left

    def _drop_unreferenced(self, graces: Graces, *, is_dry: bool) -> Iterator[Reclaimed]:
        """Files that nothing refers to, unless somebody is at them (a copy takes its time)."""
        done = Reclaimed(place="spool", run="", what="files", why="nothing refers to them")
        for file in self._spool.unreferenced_files():
            try:
                seen = os.stat(self._spool.data_path(file), follow_symlinks=False)
                stamp, size = f"{seen.st_size}-{seen.st_mtime_ns}", seen.st_blocks * _BLOCK_BYTES
            except FileNotFoundError:
                stamp, size = "", 0
            if self._sightings.age_s(f"file:{file}", stamp) < graces.unfinished_s:
                continue
            if not is_dry and not self._drop_file(file):
                continue
            done.count += 1
            done.size += size
        if done.count:
            yield done

    def _drop_file(self, file: int) -> bool:
        with self._spool.transaction():
            if self._spool.nodes_of_file(file) or self._spool.handles(file=file):
                return False
            self._spool.drop_file(file)
        return True

    def _drop_strays(self, *, is_dry: bool) -> Iterator[Reclaimed]:
        done = Reclaimed(place="spool", run="", what="files", why="not in the database")
        for path, size in self._spool.stray_files():
            if is_dry or self._spool.drop_stray(path):
                done.count += 1
                done.size += size
        if done.count:
            yield done
