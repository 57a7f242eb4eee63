"""Spools and rows for the tests of the spool on SQLite."""

from __future__ import annotations

from typing import Any

from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import (
    AttemptRow,
    NodeKind,
    NodeRow,
)
from ckptgate_adapters.sqlite_spool import SqliteSpool

STORE = "file:///store"


def make(path: object) -> SqliteSpool:
    return SqliteSpool.create_or_open(str(path), store_url=STORE, host="node1")


def node(kind: NodeKind = NodeKind.FILE, **fields: Any) -> NodeRow:
    given: dict[str, Any] = {
        "ino": 0,
        "attempt": None,
        "mode": 0o644,
        "uid": 1,
        "gid": 2,
        "size": 0,
        "mtime_ns": 3,
        "ctime_ns": 4,
    }
    return NodeRow(kind=kind, **(given | fields))


def attempt_row(**fields: Any) -> AttemptRow:
    given: dict[str, Any] = {
        "id": 0,
        "run": "a/b",
        "run_ino": 1,
        "name": "step-1",
        "attempt": "",
        "job_key": "run:x",
        "generation": -1,
        "state": AttemptState.OPEN,
        "root": 2,
    }
    return AttemptRow(**(given | fields))
