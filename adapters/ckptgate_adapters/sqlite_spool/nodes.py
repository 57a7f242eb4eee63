"""Inodes and names in the database. See `ports.spool.Nodes`. Thread rule: any thread."""

from __future__ import annotations

from typing import Final

import msgspec

from ckptgate.errors import ExistsError, MissingError
from ckptgate.model.documents import Evidence
from ckptgate.model.states import FileState
from ckptgate.ports.spool import ROOT_INO, FileRow, HandleRow, NodeRow
from ckptgate_adapters.sqlite_spool.connection import Database
from ckptgate_adapters.sqlite_spool.creating import (
    CLOSE_FILE,
    CREATE_FILE,
    create_values,
)
from ckptgate_adapters.sqlite_spool.kept import KEPT_MAX, Counted, KeptRows, put
from ckptgate_adapters.sqlite_spool.numbers import Numbers
from ckptgate_adapters.sqlite_spool.rows import NODES

__all__ = ["NodePart"]

_NO_EVIDENCE: Final = Evidence()
_COLUMNS: Final = NODES.qualified("n")
_CHILD: Final = (
    f"SELECT {_COLUMNS} FROM names AS m JOIN nodes AS n ON n.ino = m.ino "  # noqa: S608 - own columns
    "WHERE m.parent = ? AND m.name = ?"
)
_CHILDREN: Final = (
    f"SELECT m.name, {_COLUMNS} FROM names AS m JOIN nodes AS n ON n.ino = m.ino "  # noqa: S608 - own columns
    "WHERE m.parent = ? ORDER BY m.made_ns, m.name"
)
_COUNT_CHILDREN: Final = (
    "SELECT count(*), total(kind = 'dir') FROM (SELECT n.kind FROM names AS m"
    " CROSS JOIN nodes AS n ON n.ino = m.ino WHERE m.parent = ? LIMIT ?)"
)
_NAMELESS: Final = (
    f"SELECT {_COLUMNS} FROM nodes AS n LEFT JOIN names AS m ON m.ino = n.ino "  # noqa: S608 - own columns
    f"WHERE m.ino IS NULL AND n.ino <> {ROOT_INO} "
    "AND NOT EXISTS (SELECT 1 FROM attempts AS a WHERE a.root = n.ino) "
    "AND NOT EXISTS (SELECT 1 FROM pending AS p WHERE p.ino = n.ino) ORDER BY n.ino"
)
_LINK: Final = "INSERT INTO names (parent, name, ino, made_ns) VALUES (?, ?, ?, ?)"
_UNLINK: Final = "DELETE FROM names WHERE parent = ? AND name = ? RETURNING ino"
_UNKNOWN: Final = -1
"""Stands for the number of a child of which nothing is kept."""


class NodePart:
    """Inodes and names."""

    _db: Database
    _node_numbers: Numbers

    def node(self, ino: int) -> NodeRow | None:
        db = self._db
        with db.lock:
            nodes = db.kept().nodes
            if ino in nodes:
                return nodes[ino]
            row = db.one(NODES.by_key, (ino,))
            return db.keep(nodes, ino, None if row is None else NODES.build(row))

    def next_node(self) -> int:
        return self._node_numbers.take()

    def create_file(self, parent: int, name: str, node: NodeRow, handle: HandleRow) -> NodeRow:
        """See `ports.spool.Nodes.create_file`.

        Raises:
            ExistsError: the name is taken.
        """
        db, file = self._db, node.file
        assert file is not None
        values = create_values(parent, name, node, handle, db.moment())
        with db.joined:
            try:
                db.run(CREATE_FILE, values, keeps=True)
            except ExistsError as exc:
                raise ExistsError(
                    f"name is taken: {name!r} in node {parent}", subject=name
                ) from exc
            kept = db.kept()
            put(kept.nodes, node.ino, node)
            self._keep_child(kept, parent, name, node.ino)
            put(kept.places, node.ino, (parent, name))
            known = kept.counts.get(parent)
            if known is not None and known.children < known.most:
                more = Counted(known.children + 1, known.directories, known.most)
                put(kept.counts, parent, more)
            evidence = Evidence(rank=handle.rank) if handle.rank >= 0 else _NO_EVIDENCE
            put(kept.files, file, FileRow(file=file, state=FileState.OPEN, evidence=evidence))
        return node

    def close_file(self, fh: int, file: FileRow, node: NodeRow) -> None:
        db = self._db
        values = (fh, file.file, node.ino, node.size, node.mtime_ns, node.ctime_ns)
        with db.joined:
            db.run(CLOSE_FILE, values, keeps=True)
            kept = db.kept()
            put(kept.nodes, node.ino, node)
            put(kept.files, file.file, msgspec.structs.replace(file, state=FileState.QUIET))

    def add_node(self, node: NodeRow) -> NodeRow:
        if node.ino:
            self._node_numbers.skip(node.ino)
        with self._db.joined:
            values = NODES.values(node, node.ino or self._node_numbers.take())
            self._db.run(NODES.insert, values, keeps=True)
            added = NODES.build(tuple(values))
            return self._db.keep(self._db.kept().nodes, added.ino, added)

    def update_node(self, ino: int, **changes: object) -> NodeRow:
        if not changes:
            found = self.node(ino)
            if found is None:
                raise _missing(ino)
            return found
        sql, values = NODES.update(changes)
        with self._db.joined:
            row = self._db.changed(sql, (*values, ino), keeps=True)
            if row is None:
                raise _missing(ino)
            return self._db.keep(self._db.kept().nodes, ino, NODES.build(row))

    def drop_node(self, ino: int) -> None:
        with self._db.joined:
            self._db.run(NODES.delete, (ino,), keeps=True)
            self._db.run("DELETE FROM xattrs WHERE ino = ?", (ino,), keeps=True)
            self._db.keep(self._db.kept().nodes, ino, None)

    def child(self, parent: int, name: str) -> NodeRow | None:
        db = self._db
        with db.lock:
            kept = db.kept()
            ino = kept.children.get((parent, name), _UNKNOWN)
            if ino is None or (ino == _UNKNOWN and parent in kept.whole):
                return None
            if ino in kept.nodes:
                return kept.nodes[ino]
            row = db.one(_CHILD, (parent, name))
            if row is None:
                self._keep_child(kept, parent, name, None)
                return None
            node = NODES.build(row)
            self._keep_child(kept, parent, name, node.ino)
            return db.keep(kept.nodes, node.ino, node)

    def _keep_child(self, kept: KeptRows, parent: int, name: str, ino: int | None) -> None:
        """Keep what a name means; with the lock."""
        if len(kept.children) >= KEPT_MAX:
            kept.whole.clear()
        self._db.keep(kept.children, (parent, name), ino)

    def children(self, parent: int) -> list[tuple[str, NodeRow]]:
        build = NODES.build
        return [(row[0], build(row[1:])) for row in self._db.all(_CHILDREN, (parent,))]

    def count_children(self, parent: int, *, most: int = 1) -> tuple[int, int]:
        db = self._db
        with db.lock:
            kept = db.kept()
            known = kept.counts.get(parent)
            if known is not None and (known.most == most or known.children < min(most, known.most)):
                return known.children, known.directories
            row = db.one(_COUNT_CHILDREN, (parent, most))
            count, directories = (0, 0) if row is None else (row[0], int(row[1]))
            db.keep(kept.counts, parent, Counted(count, directories, most))
            if not count and kept.counts.get(parent) is not None and len(kept.whole) < KEPT_MAX:
                # Whoever gives it children keeps them.
                kept.whole.add(parent)
            return count, directories

    def link(self, parent: int, name: str, ino: int) -> None:
        """See `ports.spool.Nodes.link`.

        Raises:
            ExistsError: the name is taken, or the node has a name already.
        """
        try:
            with self._db.joined:
                self._db.run(_LINK, (parent, name, ino, self._db.moment()), keeps=True)
                kept = self._db.kept()
                self._keep_child(kept, parent, name, ino)
                self._db.keep(kept.places, ino, (parent, name))
                kept.counts.pop(parent, None)
        except ExistsError as exc:
            place = self.place(ino)
            msg = (
                f"name is taken: {name!r} in node {parent}"
                if place is None
                else f"node {ino} has a name already: {place[1]!r} in node {place[0]}"
            )
            raise ExistsError(msg, subject=name) from exc

    def unlink(self, parent: int, name: str) -> None:
        with self._db.joined:
            row = self._db.changed(_UNLINK, (parent, name), keeps=True)
            kept = self._db.kept()
            self._keep_child(kept, parent, name, None)
            kept.counts.pop(parent, None)
            if row is not None:
                self._db.keep(kept.places, int(row[0]), None)

    def place(self, ino: int) -> tuple[int, str] | None:
        db = self._db
        with db.lock:
            places = db.kept().places
            if ino in places:
                return places[ino]
            row = db.one("SELECT parent, name FROM names WHERE ino = ?", (ino,))
            return db.keep(places, ino, None if row is None else (row[0], row[1]))

    def xattrs(self, ino: int) -> dict[str, bytes]:
        rows = self._db.all("SELECT name, value FROM xattrs WHERE ino = ? ORDER BY name", (ino,))
        return dict(rows)

    def set_xattr(self, ino: int, name: str, value: bytes) -> None:
        self._db.run(
            "INSERT OR REPLACE INTO xattrs (ino, name, value) VALUES (?, ?, ?)",
            (ino, name, value),
            keeps=True,
        )

    def drop_xattr(self, ino: int, name: str) -> None:
        self._db.run("DELETE FROM xattrs WHERE ino = ? AND name = ?", (ino, name), keeps=True)

    def copy_xattrs(self, source: int, target: int) -> None:
        self._db.run(
            "INSERT INTO xattrs (ino, name, value) SELECT ?, name, value FROM xattrs WHERE ino = ?",
            (target, source),
            keeps=True,
        )

    def nameless_nodes(self) -> list[NodeRow]:
        return [NODES.build(row) for row in self._db.all(_NAMELESS)]


def _missing(ino: int) -> MissingError:
    return MissingError(f"node {ino} is not in the spool", subject=str(ino))
