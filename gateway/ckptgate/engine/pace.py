"""How often something is looked at that takes longer the more there is of it.

It owns the rule that looks at one thing take a small share of the time at most: after one that took
long, the next one waits a multiple of that. What is small is looked at on every pass.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import Final

from ckptgate.ports.clock import Clock

__all__ = ["Pace"]

PAUSE_FACTOR: Final = 20
KEYS_KEPT: Final = 256


class Pace:
    """When each thing may be looked at again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_at: OrderedDict[Hashable, float] = OrderedDict()

    def is_due(self, key: Hashable) -> bool:
        """Whether it was never looked at, or its pause is over."""
        due_at = self._due_at.get(key)
        return due_at is None or self._clock.monotonic() >= due_at

    @contextmanager
    def look(self, key: Hashable) -> Generator[None]:
        """The block is a look at it."""
        began_s = self._clock.monotonic()
        try:
            yield
        finally:
            now_s = self._clock.monotonic()
            self._due_at[key] = now_s + PAUSE_FACTOR * (now_s - began_s)
            self._due_at.move_to_end(key)
            while len(self._due_at) > KEYS_KEPT:
                self._due_at.popitem(last=False)
