"""How long requests wait for their answers: what a trainer feels of the gateway.

It owns which request counts as what. The kernel's own reads and writes of passed-through files are
no requests. Any thread; it costs about a microsecond a request.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from ckptgate.ports.meters import REQUEST_SECONDS, WAITING_SINCE, Meters
from ckptgate_adapters.fuse.table import LOOKS, OPERATIONS
from ckptgate_adapters.fuse.wire import Opcode

__all__ = ["Timing"]

_UNTOLD: Final = frozenset({
    Opcode.INIT, Opcode.DESTROY, Opcode.INTERRUPT, Opcode.FORGET, Opcode.BATCH_FORGET,
})  # fmt: skip
"""Nobody waits for these."""


def _kind(opcode: int) -> str:
    if opcode == Opcode.READ:
        return "read"
    if opcode == Opcode.WRITE:
        return "write"
    return "look" if opcode in LOOKS else "change"


_KINDS: Final = {int(opcode): _kind(opcode) for opcode in OPERATIONS if opcode not in _UNTOLD}


class Timing:
    """Measures one server's requests."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}
        # A server that was killed has left the time of a request that was sent again since.
        meters.set(WAITING_SINCE, 0.0)

    def waits(self, unique: int, began_s: float) -> None:
        """The request goes to a pool, where it may wait."""
        with self._lock:
            self._waiting[unique] = began_s
            self._tell()

    def done(self, opcode: int, unique: int, began_s: float) -> None:
        """It is answered."""
        if self._waiting:
            with self._lock:
                if self._waiting.pop(unique, None) is not None:
                    self._tell()
        kind = _KINDS.get(opcode)
        if kind is not None:
            self._meters.observe(REQUEST_SECONDS, time.monotonic() - began_s, kind)

    def _tell(self) -> None:
        """When the oldest of those that wait came, as they came one after the other."""
        self._meters.set(WAITING_SINCE, next(iter(self._waiting.values()), 0.0))
