"""Open handles; they outlive the mount process. See `ports.spool.Handles`. Any thread."""

from __future__ import annotations

from ckptgate.ports.spool import HandleRow
from ckptgate_adapters.sqlite_spool.connection import Database
from ckptgate_adapters.sqlite_spool.noted import NotedCloses
from ckptgate_adapters.sqlite_spool.numbers import Numbers
from ckptgate_adapters.sqlite_spool.rows import HANDLES

__all__ = ["HandlePart"]


class HandlePart:
    """Open handles."""

    _db: Database
    _handle_numbers: Numbers
    _noted: NotedCloses

    def add_handle(self, handle: HandleRow) -> None:
        self._db.run(HANDLES.insert, HANDLES.values(handle, handle.fh))

    def handle(self, fh: int) -> HandleRow | None:
        row = self._db.one(HANDLES.by_key, (fh,))
        return None if row is None else HANDLES.build(row)

    def update_handle(self, fh: int, **changes: object) -> None:
        """Change the named fields; an unknown handle (from before a restart) is ignored."""
        if changes:
            sql, values = HANDLES.update(changes)
            self._db.changed(sql, (*values, fh))

    def drop_handle(self, fh: int) -> None:
        self._db.run(HANDLES.delete, (fh,))

    def handles(self, *, file: int | None = None) -> list[HandleRow]:
        if file is None:
            rows = self._db.all(f"{HANDLES.select} ORDER BY fh")
        else:
            rows = self._db.all(f"{HANDLES.select} WHERE file = ? ORDER BY fh", (file,))
        return [HANDLES.build(row) for row in rows]

    def handles_of_attempt(self, attempt: int) -> list[HandleRow]:
        rows = self._db.all(
            f"SELECT {HANDLES.qualified('h')} FROM handles AS h CROSS JOIN nodes AS n "  # noqa: S608 - own columns
            "ON n.ino = h.ino WHERE n.attempt = ? ORDER BY h.fh",
            (attempt,),
        )
        return [HANDLES.build(row) for row in rows]

    def clear_handles(self) -> list[HandleRow]:
        with self._db.transaction:
            found = self.handles()
            self._db.run("DELETE FROM handles")
        return found

    def note_close(self, fh: int, *, is_released: bool) -> bool:
        return self._noted.note(fh, is_released=is_released)

    def noted_closes(self) -> list[tuple[int, bool]]:
        return self._noted.all()

    def forget_close(self, fh: int) -> None:
        self._noted.drop(fh)

    def next_handle(self) -> int:
        return self._handle_numbers.take()
