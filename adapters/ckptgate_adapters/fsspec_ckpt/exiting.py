"""The end of a process: what it had sealed is waited for, as its container may end with it.

Owns the rule: the wait is bounded, and what is left then is said. Notes are kept of this process
only; the daemon goes on with what is left as long as it lives. Any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from typing import Final

from ckptgate_adapters.fsspec_ckpt import messages
from ckptgate_adapters.fsspec_ckpt.connection import Client

__all__ = ["finish", "note", "wait_for"]

_log = logging.getLogger(__name__)

_NOTED_MAX: Final = 256
_POLL_S: Final = 0.1
_STATE: Final = "user.ckptgate.state"
_STORED: Final = "user.ckptgate.stored"
_SHOWN: Final = 8


class _Noted:
    """What one client wrote: directories with the last file in each, and committed checkpoints."""

    def __init__(self, client: Client, linger_s: float) -> None:
        self.client = client
        self.linger_s = linger_s
        self.pid = os.getpid()
        self.files: OrderedDict[str, str] = OrderedDict()
        self.committed: OrderedDict[str, None] = OrderedDict()


_lock = threading.Lock()
_noted: dict[int, _Noted] = {}


def wait_for(client: Client, linger_s: float) -> None:
    """Have this process wait at its end, *linger_s* at most, for what it seals by this client."""
    with _lock:
        _noted[id(client)] = _Noted(client, linger_s)


def note(client: Client, path: str, *, is_committed: bool = False) -> None:
    """A file was written, or a checkpoint committed."""
    with _lock:
        noted = _noted.get(id(client))
        if noted is None:
            return
        if is_committed:
            noted.committed[path] = None
        else:
            noted.files[path.rpartition("/")[0]] = path
            noted.files.move_to_end(path.rpartition("/")[0])
        for entries in (noted.files, noted.committed):
            while len(entries) > _NOTED_MAX:
                entries.popitem(last=False)


def finish(linger_s: float | None = None) -> list[str]:
    """Wait until everything that was sealed is decided, and plain files are in the store.

    Args:
        linger_s: at most, in seconds; by default as each file system was told.

    Returns:
        What is left, as it is to be said.
    """
    with _lock:
        every = [noted for noted in _noted.values() if noted.pid == os.getpid()]
    left: list[str] = []
    for noted in every:
        left += _finished(noted, noted.linger_s if linger_s is None else linger_s)
    return left


def _finished(noted: _Noted, linger_s: float) -> list[str]:
    until = time.monotonic() + linger_s
    waiting: dict[str, bool] = dict.fromkeys(noted.files.values(), False)
    waiting.update(dict.fromkeys(noted.committed, True))
    if linger_s <= 0:
        return []
    noted.client.end_at(until)
    try:
        return _left(noted.client, waiting, until)
    finally:
        noted.client.end_at(math.inf)


def _left(client: Client, waiting: dict[str, bool], until: float) -> list[str]:
    """What of it is undecided at that time; path -> whether it was committed here."""
    while waiting:
        for path, own in list(waiting.items()):
            is_left = _is_left(client, path, own)
            if time.monotonic() >= until:
                # A daemon that answers nobody (it is stopped, say) says nothing of the rest.
                return sorted(waiting)
            if not is_left:
                del waiting[path]
        if waiting:
            time.sleep(_POLL_S)
    return []


def _is_left(client: Client, path: str, is_committed: bool) -> bool:
    """Whether waiting for it makes sense: it is sealed or committed here, and not decided."""
    try:
        state = json.loads(client.call(messages.GetXattr(path=path, name=_STATE)).told.data)[
            "state"
        ]
    except FileNotFoundError:
        return False
    except OSError:
        try:
            stored = client.call(messages.GetXattr(path=path, name=_STORED)).told.data
        except OSError:
            return False
        return bool(stored == b"no")
    return bool(state == "sealed" or (is_committed and state == "open"))


def _begin_in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have had it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_in_child)


@atexit.register
def _at_exit() -> None:
    for noted in list(_noted.values()):
        # Nothing would be waited for in one that is started now.
        noted.client.start_no_daemon()
    with contextlib.suppress(Exception):
        left = finish()
        if left:
            names = ", ".join(left[:_SHOWN]) + (", ..." if len(left) > _SHOWN else "")
            _log.warning("not-decided-yet names=%s: the daemon goes on with it", names)
    for noted in list(_noted.values()):
        if noted.pid == os.getpid():
            noted.client.close()
