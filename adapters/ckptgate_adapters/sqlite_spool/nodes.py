"""Inodes and names in the database. See `ports.spool.Nodes`. Thread rule: any thread."""

from __future__ import annotations

from typing import Final

from ckptgate.errors import ExistsError, MissingError
from ckptgate.ports.spool import ROOT_INO, NodeRow
from ckptgate_adapters.sqlite_spool.connection import Database
from ckptgate_adapters.sqlite_spool.numbers import Numbers
from ckptgate_adapters.sqlite_spool.rows import NODES

__all__ = ["NodePart"]

_COLUMNS: Final = NODES.qualified("n")
_CHILD: Final = (
    f"SELECT {_COLUMNS} FROM names AS m JOIN nodes AS n ON n.ino = m.ino "  # noqa: S608 - own columns
    "WHERE m.parent = ? AND m.name = ?"
)
_CHILDREN: Final = (
    f"SELECT m.name, {_COLUMNS} FROM names AS m JOIN nodes AS n ON n.ino = m.ino "  # noqa: S608 - own columns
    "WHERE m.parent = ? ORDER BY m.made_ns, m.name"
)
_NAMELESS: Final = (
    f"SELECT {_COLUMNS} FROM nodes AS n LEFT JOIN names AS m ON m.ino = n.ino "  # noqa: S608 - own columns
    f"WHERE m.ino IS NULL AND n.ino <> {ROOT_INO} "
    "AND NOT EXISTS (SELECT 1 FROM attempts AS a WHERE a.root = n.ino) "
    "AND NOT EXISTS (SELECT 1 FROM pending AS p WHERE p.ino = n.ino) ORDER BY n.ino"
)


class NodePart:
    """Inodes and names."""

    _db: Database
    _node_numbers: Numbers

    def node(self, ino: int) -> NodeRow | None:
        row = self._db.one(NODES.by_key, (ino,))
        return None if row is None else NODES.build(row)

    def add_node(self, node: NodeRow) -> NodeRow:
        if node.ino:
            self._node_numbers.skip(node.ino)
            self._db.run(NODES.insert, NODES.values(node, node.ino))
            return node
        values = NODES.values(node, self._node_numbers.take())
        self._db.run(NODES.insert, values)
        return NODES.build(tuple(values))

    def update_node(self, ino: int, **changes: object) -> NodeRow:
        if not changes:
            row = self._db.one(NODES.by_key, (ino,))
        else:
            sql, values = NODES.update(changes)
            row = self._db.one(sql, (*values, ino))
        if row is None:
            msg = f"node {ino} is not in the spool"
            raise MissingError(msg, subject=str(ino))
        return NODES.build(row)

    def drop_node(self, ino: int) -> None:
        self._db.run(NODES.delete, (ino,))

    def child(self, parent: int, name: str) -> NodeRow | None:
        row = self._db.one(_CHILD, (parent, name))
        return None if row is None else NODES.build(row)

    def children(self, parent: int) -> list[tuple[str, NodeRow]]:
        build = NODES.build
        return [(row[0], build(row[1:])) for row in self._db.all(_CHILDREN, (parent,))]

    def count_children(self, parent: int) -> int:
        row = self._db.one("SELECT count(*) FROM names WHERE parent = ?", (parent,))
        return 0 if row is None else row[0]

    def link(self, parent: int, name: str, ino: int) -> None:
        """See `ports.spool.Nodes.link`.

        Raises:
            ExistsError: the name is taken, or the node has a name already.
        """
        try:
            self._db.run(
                "INSERT INTO names (parent, name, ino, made_ns) VALUES (?, ?, ?, ?)",
                (parent, name, ino, self._db.moment()),
            )
        except ExistsError as exc:
            place = self.place(ino)
            msg = (
                f"name is taken: {name!r} in node {parent}"
                if place is None
                else f"node {ino} has a name already: {place[1]!r} in node {place[0]}"
            )
            raise ExistsError(msg, subject=name) from exc

    def unlink(self, parent: int, name: str) -> None:
        self._db.run("DELETE FROM names WHERE parent = ? AND name = ?", (parent, name))

    def place(self, ino: int) -> tuple[int, str] | None:
        row = self._db.one("SELECT parent, name FROM names WHERE ino = ?", (ino,))
        return None if row is None else (row[0], row[1])

    def nameless_nodes(self) -> list[NodeRow]:
        return [NODES.build(row) for row in self._db.all(_NAMELESS)]
