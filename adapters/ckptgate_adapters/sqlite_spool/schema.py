"""The database's tables and their version; FORMAT.md describes each column, and a test holds it to.

Thread rule: `create` and `check` are called on a connection that nobody else uses yet.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

from ckptgate.errors import FormatVersionError, UnusableError

__all__ = ["APPLICATION_ID", "DDL", "SPOOL_FORMAT", "check", "create", "is_empty"]

SPOOL_FORMAT: Final = 1
"""Version of this schema, in `meta.format`; another one is refused."""
APPLICATION_ID: Final = 0x636B7074
"""`ckpt` in ASCII, in the database's header: `file` and we tell a spool from other databases."""

# What a create in the mount touches costs one page each in the journal, so those tables have few
# indexes; handles are so few that they are searched. Numbers of nodes, files and handles come from
# `meta`; ids of the other tables are AUTOINCREMENT where something else may remember them.
DDL: Final = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE replies (
    request INTEGER PRIMARY KEY,
    made_ns INTEGER NOT NULL,
    reply BLOB NOT NULL
) STRICT;
CREATE TABLE nodes (
    ino INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    attempt INTEGER,
    mode INTEGER NOT NULL,
    uid INTEGER NOT NULL,
    gid INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    target TEXT NOT NULL,
    file INTEGER,
    base INTEGER,
    plain_path TEXT
) STRICT;
CREATE INDEX nodes_by_file ON nodes (file) WHERE file IS NOT NULL;
CREATE TABLE names (
    parent INTEGER NOT NULL,
    name TEXT NOT NULL,
    ino INTEGER NOT NULL UNIQUE,
    made_ns INTEGER NOT NULL,
    PRIMARY KEY (parent, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE xattrs (
    ino INTEGER NOT NULL,
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (ino, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE files (
    file INTEGER PRIMARY KEY,
    state TEXT NOT NULL,
    local TEXT NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    digest TEXT NOT NULL,
    chunks BLOB NOT NULL,
    key TEXT NOT NULL,
    have BLOB NOT NULL,
    evidence TEXT NOT NULL,
    is_linked INTEGER NOT NULL
) STRICT;
CREATE INDEX files_waiting ON files (state, file) WHERE state IN ('quiet', 'digested');
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    run_ino INTEGER NOT NULL,
    name TEXT NOT NULL,
    attempt TEXT NOT NULL,
    job_key TEXT NOT NULL,
    generation INTEGER NOT NULL,
    state TEXT NOT NULL,
    root INTEGER NOT NULL,
    base INTEGER,
    event TEXT NOT NULL,
    detail TEXT NOT NULL,
    is_joined INTEGER NOT NULL,
    is_voted INTEGER NOT NULL,
    votes_count INTEGER NOT NULL,
    names_count INTEGER NOT NULL,
    world_size INTEGER,
    committed_all INTEGER NOT NULL,
    seal_index INTEGER NOT NULL,
    manifest TEXT NOT NULL,
    format_name TEXT NOT NULL,
    created_ns INTEGER NOT NULL,
    event_ns INTEGER NOT NULL,
    write_ns INTEGER NOT NULL,
    reason TEXT NOT NULL,
    missing TEXT NOT NULL
) STRICT;
CREATE INDEX attempts_by_name ON attempts (run_ino, name);
CREATE INDEX attempts_by_run ON attempts (run, name);
CREATE INDEX attempts_by_id ON attempts (run, attempt);
CREATE INDEX attempts_by_state ON attempts (state);
CREATE INDEX attempts_by_name_state ON attempts (run_ino, state);
CREATE INDEX attempts_by_run_state ON attempts (run, state);
CREATE INDEX attempts_by_root ON attempts (root);
CREATE TABLE rank_commits (
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    PRIMARY KEY (attempt, rank)
) STRICT, WITHOUT ROWID;
CREATE TABLE writer_ranks (
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    PRIMARY KEY (attempt, rank)
) STRICT, WITHOUT ROWID;
CREATE TABLE seen (
    attempt INTEGER NOT NULL,
    member TEXT NOT NULL,
    what TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (attempt, member, what)
) STRICT, WITHOUT ROWID;
CREATE TABLE handles (
    fh INTEGER PRIMARY KEY,
    ino INTEGER NOT NULL,
    file INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    start INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    is_closed INTEGER NOT NULL
) STRICT;
CREATE TABLE pending (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    parent INTEGER NOT NULL,
    name TEXT NOT NULL,
    ino INTEGER,
    kind TEXT NOT NULL,
    job_key TEXT NOT NULL,
    target TEXT NOT NULL
) STRICT;
CREATE INDEX pending_by_name ON pending (parent, name);
CREATE INDEX pending_by_ino ON pending (ino);
CREATE TABLE tombstones (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    attempt TEXT NOT NULL,
    job_key TEXT NOT NULL
) STRICT;
CREATE INDEX tombstones_by_run ON tombstones (run);
CREATE TABLE name_ops (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    attempt INTEGER NOT NULL,
    op TEXT NOT NULL,
    path TEXT NOT NULL,
    "to" TEXT NOT NULL,
    mode INTEGER NOT NULL,
    after TEXT NOT NULL
) STRICT;
CREATE INDEX name_ops_by_attempt ON name_ops (attempt);
CREATE TABLE moves (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    attempt INTEGER NOT NULL,
    member TEXT NOT NULL,
    n INTEGER NOT NULL,
    path TEXT NOT NULL,
    "to" TEXT NOT NULL
) STRICT;
CREATE INDEX moves_by_attempt ON moves (attempt);
CREATE TABLE plain_ops (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    op TEXT NOT NULL,
    path TEXT NOT NULL,
    "to" TEXT NOT NULL,
    ino INTEGER,
    mode INTEGER NOT NULL
) STRICT;
CREATE TABLE runs (
    run TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;
"""


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the database has no table yet."""
    return connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone() is None


def create(connection: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    """Make the tables; the caller holds a writing transaction on an empty database."""
    for statement in DDL.split(";"):
        if statement.strip():
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta.items())


def check(connection: sqlite3.Connection, path: str) -> dict[str, str]:
    """The settings of the spool whose database *path* is.

    Raises:
        UnusableError: it is a database, but not a spool's.
        FormatVersionError: of another version.
    """
    (found,) = connection.execute("PRAGMA application_id").fetchone()
    if found != APPLICATION_ID:
        msg = f"not the database of a spool: {path}"
        raise UnusableError(msg, subject=path, hint="name another directory with --spool")
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if meta.get("format") != str(SPOOL_FORMAT):
        msg = (
            f"the spool {path} has format {meta.get('format')!r}, "
            f"this ckptgate reads {SPOOL_FORMAT}"
        )
        raise FormatVersionError(msg, subject=path, hint="use the ckptgate release that wrote it")
    return meta
