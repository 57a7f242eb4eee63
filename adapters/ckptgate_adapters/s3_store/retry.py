"""When a request is made again: bounded, jittered, and only where the error says that it may help.

The only layer that retries: botocore's and s3fs's are off or not in the way. Loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptgate.errors import CkptError, TransientStoreError
from ckptgate_adapters.s3_store.failures import BadBytesError, ThrottledError

__all__ = ["RetryPolicy", "may_help"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def may_help(exc: CkptError) -> bool:
    """Whether the same request may succeed if it is made again.

    What arrived with a flipped bit was refused, and is sent again.
    """
    return isinstance(exc, (TransientStoreError, BadBytesError))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and with what pauses.

    Attributes:
        tries_max: the first included.
        first_s: the longest pause before the second try; it doubles from there.
        max_s: the longest of all.
        sleep: waits that many seconds.
        chance: a number in [0, 1) each time.
    """

    tries_max: int
    first_s: float
    max_s: float
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    chance: Callable[[], float] = random.random

    def pause_s(self, tries: int, exc: CkptError) -> float:
        """The pause after *tries* that failed, the last with *exc*.

        Anything up to the limit, so that many who failed together don't come back together; at
        least half of it where the store asked to be called less often.
        """
        limit = min(self.max_s, self.first_s * 2.0 ** (tries - 1))
        if isinstance(exc, ThrottledError):
            return limit * (0.5 + self.chance() / 2)
        return limit * self.chance()

    async def run(self, call: Callable[[], Awaitable[_T]], what: str) -> _T:
        """The result of *call*, made again after errors that may pass; its last error else."""
        tries = 1
        while True:
            try:
                return await call()
            except CkptError as exc:
                if not may_help(exc) or tries >= self.tries_max:
                    raise
                pause = self.pause_s(tries, exc)
                _log.info("s3-retry what=%s try=%d pause_s=%.2f error=%s", what, tries, pause, exc)
            await self.sleep(pause)
            tries += 1
