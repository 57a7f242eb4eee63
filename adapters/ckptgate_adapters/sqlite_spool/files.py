"""Files by id: their rows, and where their bytes lie. See `ports.spool.Files`.

Thread rule: any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import Final

from ckptgate.errors import MissingError
from ckptgate.model.states import FileState, advance_file
from ckptgate.ports.spool import FileRow, LocalBytes, NodeRow
from ckptgate_adapters.sqlite_spool.connection import Database
from ckptgate_adapters.sqlite_spool.durability import Durability
from ckptgate_adapters.sqlite_spool.last_use import set_last_use
from ckptgate_adapters.sqlite_spool.numbers import Numbers
from ckptgate_adapters.sqlite_spool.removal import Removal, remove
from ckptgate_adapters.sqlite_spool.rows import FILES, NODES
from ckptgate_adapters.sqlite_spool.usage import Usage

__all__ = ["DATA_DIR", "DATA_FANOUT", "FilePart"]

_log = logging.getLogger(__name__)

DATA_DIR: Final = "data"
DATA_FANOUT: Final = 256
"""Spool files lie in so many directories, by file id."""

_NODE_WIDTH: Final = len(NODES.columns.split(", "))
_COUNTED: Final = (
    "WITH RECURSIVE walk (ino) AS ("
    " SELECT m.ino FROM attempts AS a JOIN names AS m ON m.parent = a.root WHERE a.id = ?1"
    " UNION ALL SELECT m.ino FROM walk AS w JOIN names AS m ON m.parent = w.ino)"
    " SELECT {rank}, f.state, count(*), total(max(n.size, f.size))"
    " FROM walk AS w JOIN nodes AS n ON n.ino = w.ino JOIN files AS f ON f.file = n.file"
    " WHERE ?2 = '' OR substr(f.key, 1, length(?2)) <> ?2 OR substr(f.key, 1, length(?3)) = ?3"
    " GROUP BY 1, 2"
)
_COUNT_FILES: Final = _COUNTED.format(rank="-1")
_COUNT_RANKS: Final = _COUNTED.format(
    rank="iif(json_valid(f.evidence), coalesce(json_extract(f.evidence, '$.rank'), -1), -1)"
)
_UNREFERENCED: Final = (
    "SELECT f.file FROM files AS f"
    " WHERE NOT EXISTS (SELECT 1 FROM nodes AS n WHERE n.file = f.file)"
    " AND f.file NOT IN (SELECT h.file FROM handles AS h) ORDER BY f.file"
)
_BLOCK_BYTES: Final = 512
_TREE_FILES: Final = (
    "WITH RECURSIVE walk (path, ino) AS ("  # noqa: S608 - own columns
    " SELECT m.name, m.ino FROM attempts AS a JOIN names AS m ON m.parent = a.root WHERE a.id = ?"
    " UNION ALL"
    " SELECT w.path || '/' || m.name, m.ino FROM walk AS w JOIN names AS m ON m.parent = w.ino)"
    f" SELECT w.path, {NODES.qualified('n')}, {FILES.qualified('f')}"
    " FROM walk AS w JOIN nodes AS n ON n.ino = w.ino JOIN files AS f ON f.file = n.file"
)


def _waiting(state: FileState) -> str:
    # From the files that wait upwards: an attempt's root has no name, so the way up ends there.
    # The state is written out, else SQLite would not take the index of those that wait.
    return (
        "WITH RECURSIVE waits (file, ino) AS MATERIALIZED ("  # noqa: S608 - own columns
        " SELECT f.file, n.ino FROM files AS f CROSS JOIN nodes AS n ON n.file = f.file"
        f" WHERE f.state IN ('quiet', 'digested') AND f.state = '{state.value}'"
        " AND f.file > ?2 AND n.attempt = ?1"
        " AND EXISTS (SELECT 1 FROM names AS m WHERE m.ino = n.ino)"
        " ORDER BY f.file LIMIT ?3),"
        " up (ino, file, parent, path) AS ("
        " SELECT w.ino, w.file, m.parent, m.name FROM waits AS w JOIN names AS m ON m.ino = w.ino"
        " UNION ALL"
        " SELECT u.ino, u.file, m.parent, m.name || '/' || u.path"
        " FROM up AS u JOIN names AS m ON m.ino = u.parent)"
        f" SELECT u.path, {NODES.qualified('n')}, {FILES.qualified('f')}"
        " FROM attempts AS a CROSS JOIN up AS u CROSS JOIN nodes AS n ON n.ino = u.ino"
        " CROSS JOIN files AS f ON f.file = u.file"
        " WHERE a.id = ?1 AND u.parent = a.root ORDER BY f.file"
    )


_WAITING: Final = {state: _waiting(state) for state in (FileState.QUIET, FileState.DIGESTED)}


class FilePart:
    """Bytes by file id."""

    _db: Database
    _data: str
    _usage: Usage
    _durability: Durability
    _file_numbers: Numbers
    _removal: Removal

    def add_file(
        self, *, local: LocalBytes = LocalBytes.FULL, state: FileState = FileState.OPEN
    ) -> FileRow:
        with self._db.joined:
            row = FileRow(file=self._file_numbers.take(), state=state, local=local)
            self._db.run(FILES.insert, FILES.values(row, row.file), keeps=True)
            return self._db.keep(self._db.kept().files, row.file, row)

    def next_file(self) -> int:
        return self._file_numbers.take()

    def file(self, file: int) -> FileRow | None:
        db = self._db
        with db.lock:
            files = db.kept().files
            if file in files:
                return files[file]
            row = db.one(FILES.by_key, (file,))
            return db.keep(files, file, None if row is None else FILES.build(row))

    def update_file(self, file: int, **changes: object) -> FileRow:
        """See `ports.spool.Files.update_file`.

        Raises:
            MissingError: there is no such file.
            RefusedError: the change of state is illegal; nothing was changed.
        """
        with self._db.joined:
            old = self.file(file)
            if old is None:
                raise _missing(file)
            if not changes:
                return old
            sql, values = FILES.update(changes)
            if "state" in changes:
                advance_file(old.state, FileState(str(changes["state"])))
            if "is_linked" in changes or "local" in changes:
                self._usage.changed(self.data_path(file))
            row = self._db.changed(sql, (*values, file), keeps=True)
            assert row is not None
            return self._db.keep(self._db.kept().files, file, FILES.build(row))

    def drop_file(self, file: int) -> None:
        with self._db.transaction:
            self._db.run(FILES.delete, (file,), keeps=True)
            self._db.keep(self._db.kept().files, file, None)
            # After the commit only: a rollback brings the row back, but never the bytes.
            self._db.after_commit(partial(self._removal.add, self.data_path(file)))

    def files_in(self, states: Iterable[FileState]) -> list[FileRow]:
        wanted = sorted({state.value for state in states})
        where = ", ".join("?" * len(wanted))
        rows = self._db.all(f"{FILES.select} WHERE state IN ({where}) ORDER BY file", wanted)
        return [FILES.build(row) for row in rows]

    def fetched_files(self) -> list[FileRow]:
        rows = self._db.all(f"{FILES.select} WHERE have != x'' ORDER BY file")
        return [FILES.build(row) for row in rows]

    def files_of_attempt(
        self, attempt: int, *, states: Iterable[FileState] | None = None
    ) -> list[tuple[str, NodeRow, FileRow]]:
        cut = 1 + _NODE_WIDTH
        wanted = [] if states is None else sorted({state.value for state in states})
        where = "" if states is None else f" WHERE f.state IN ({', '.join('?' * len(wanted))})"
        rows = self._db.all(f"{_TREE_FILES}{where} ORDER BY w.path", (attempt, *wanted))
        return [(row[0], NODES.build(row[1:cut]), FILES.build(row[cut:])) for row in rows]

    def waiting_files(
        self, attempt: int, state: FileState, *, after: int, limit: int
    ) -> list[tuple[str, NodeRow, FileRow]]:
        cut = 1 + _NODE_WIDTH
        rows = self._db.all(_WAITING[state], (attempt, after, limit))
        return [(row[0], NODES.build(row[1:cut]), FILES.build(row[cut:])) for row in rows]

    def count_files(
        self, attempt: int, *, foreign: str = "", own: str = ""
    ) -> dict[FileState, tuple[int, int]]:
        rows = self._db.all(_COUNT_FILES, (attempt, foreign, own))
        return {FileState(state): (count, int(size)) for _, state, count, size in rows}

    def count_ranks(
        self, attempt: int, *, foreign: str = "", own: str = ""
    ) -> dict[int, dict[FileState, tuple[int, int]]]:
        found: dict[int, dict[FileState, tuple[int, int]]] = {}
        for rank, state, count, size in self._db.all(_COUNT_RANKS, (attempt, foreign, own)):
            found.setdefault(int(rank), {})[FileState(state)] = (count, int(size))
        return found

    def nodes_of_file(self, file: int) -> list[NodeRow]:
        rows = self._db.all(f"{NODES.select} WHERE file = ? ORDER BY ino", (file,))
        return [NODES.build(row) for row in rows]

    def data_path(self, file: int) -> str:
        return f"{self._data}/{file % DATA_FANOUT:02x}/{file}"

    def note_use(self, fd: int, at_ns: int) -> None:
        set_last_use(fd, at_ns)

    def last_use_ns(self, file: int) -> int:
        try:
            return os.stat(self.data_path(file), follow_symlinks=False).st_atime_ns
        except FileNotFoundError:
            return 0

    def finish_removals(self) -> None:
        """Return when the bytes of all dropped files are gone, or can't be removed."""
        self._removal.finish()

    def unreferenced_files(self) -> list[int]:
        return [row[0] for row in self._db.all(_UNREFERENCED)]

    def allocated(self) -> int:
        opened = self._db.all("SELECT DISTINCT file FROM handles")
        database = self._db.path
        return self._usage.count(
            [self.data_path(row[0]) for row in opened], [database, f"{database}-wal"]
        )

    def stray_files(self) -> list[tuple[str, int]]:
        known = {row[0] for row in self._db.all("SELECT file FROM files")}
        found: list[tuple[str, int]] = []
        for directory in range(DATA_FANOUT):
            for file, size in _spool_files(f"{self._data}/{directory:02x}", directory):
                if file not in known:
                    found.append((self.data_path(file), size))
        if found:
            # Another process may just have dropped the row: a power loss must not bring it back.
            self._durability.sync()
        return found

    def drop_stray(self, path: str) -> bool:
        """See `ports.spool.Files.drop_stray`.

        A file that is made before its row is committed is made in that row's transaction, for
        whose end this one waits.
        """
        name = os.path.basename(path)
        if not name.isdecimal() or path != self.data_path(int(name)):
            return False
        if os.path.islink(os.path.dirname(path)):
            return False
        with self._db.transaction:
            if self.file(int(name)) is not None:
                return False
            remove(path)
        return True

    def drop_orphans(self) -> int:
        strays = self.stray_files()
        for path, _ in strays:
            remove(path)
        rows = self.unreferenced_files()
        for file in rows:
            self.drop_file(file)
        self._removal.finish()
        count = len(strays) + len(rows)
        if count:
            _log.info("orphans-removed spool=%s count=%d", self._data, count)
        return count


def _spool_files(path: str, number: int) -> list[tuple[int, int]]:
    """(id, allocated bytes) of what may be a spool file in the directory *path*.

    Anything else was put there by somebody else and is not ours to remove; nor is what a directory
    holds that a link leads to.
    """
    found: list[tuple[int, int]] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        _log.warning("spool-directory-skipped path=%s error=%s", path, exc)
        return found
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                name = entry.name
                is_ours = name.isdecimal() and name == str(int(name))
                if not is_ours or int(name) % DATA_FANOUT != number:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        seen = entry.stat(follow_symlinks=False)
                        found.append((int(name), seen.st_blocks * _BLOCK_BYTES))
    finally:
        os.close(fd)
    return found


def _missing(file: int) -> MissingError:
    return MissingError(f"file {file} is not in the spool", subject=str(file))
