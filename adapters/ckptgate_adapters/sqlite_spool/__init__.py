"""The spool on SQLite in WAL mode: protocol adapter only, nothing is decided here."""

from __future__ import annotations

from ckptgate_adapters.sqlite_spool.lock import SpoolLock
from ckptgate_adapters.sqlite_spool.place import check_local
from ckptgate_adapters.sqlite_spool.spool import SqliteSpool, make_member_id

__all__ = ["SpoolLock", "SqliteSpool", "check_local", "make_member_id"]
