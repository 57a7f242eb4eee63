"""The spool on SQLite in WAL mode: protocol adapter only, nothing is decided here.

Each name is imported when it is first asked for: the command line needs the lock alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ckptgate_adapters.sqlite_spool.lock import SpoolLock
    from ckptgate_adapters.sqlite_spool.place import check_local
    from ckptgate_adapters.sqlite_spool.spool import SqliteSpool, make_member_id

__all__ = ["SpoolLock", "SqliteSpool", "check_local", "make_member_id"]

_MODULES: Final = {
    "SpoolLock": "lock",
    "SqliteSpool": "spool",
    "check_local": "place",
    "make_member_id": "spool",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
