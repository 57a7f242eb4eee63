"""Whether the store answers, without ever waiting for one that doesn't.

It owns the rule that who asks for metrics or health never hangs with the store: a look that doesn't
come back (a dead NFS server) is left alone, and as long as it hasn't, nobody begins another one.
What the publisher reads anyway counts: while it follows a log, nothing more is asked.

Thread rule: any thread.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Final

from ckptgate.engine.runlog import RunLogs
from ckptgate.errors import CkptError, IntegrityError, MissingError
from ckptgate.model.layout import GATEWAY_DIR, join_key
from ckptgate.ports.clock import Clock
from ckptgate.ports.store import Records

__all__ = ["Reached", "StoreLook"]

_log = logging.getLogger(__name__)

_KEY: Final = join_key(GATEWAY_DIR, "contact")
"""Nothing is ever there; that the store says so is what is asked for."""
RECENT_S: Final = 15.0
_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What is known.

    Attributes:
        is_reached: it answered lately.
        age_s: since it last answered, None if it never did.
        error: what it said instead, "" for nothing yet.
    """

    is_reached: bool
    age_s: float | None
    error: str


class StoreLook:
    """Remembers when the store last answered, and asks it when that is long ago."""

    def __init__(self, store: Records, logs: RunLogs, clock: Clock) -> None:
        self._store = store
        self._logs = logs
        self._clock = clock
        self._lock = threading.Lock()
        self._answered_at: float | None = None
        self._error = ""
        self._asking: threading.Thread | None = None

    def look(self, *, wait_s: float = _WAIT_S) -> Reached:
        """What is known after waiting up to *wait_s* for an answer, where one is needed."""
        now = self._known()
        if now.is_reached:
            return now
        with self._lock:
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(target=self._ask, name="contact", daemon=True)
                self._asking.start()
            asking = self._asking
        asking.join(wait_s)
        return self._known()

    def _known(self) -> Reached:
        ages = [age for log in self._logs.known() if (age := log.age_s()) is not None]
        with self._lock:
            if self._answered_at is not None:
                ages.append(self._clock.monotonic() - self._answered_at)
            error = self._error
        age_s = min(ages, default=None)
        is_reached = age_s is not None and age_s < RECENT_S
        return Reached(is_reached=is_reached, age_s=age_s, error="" if is_reached else error)

    def _ask(self) -> None:
        error = ""
        try:
            self._store.get(_KEY, limit=1)
        except (MissingError, IntegrityError):
            pass
        except (CkptError, OSError) as exc:
            error = str(exc)
        except Exception as exc:  # noqa: BLE001 - the thread's outermost edge
            _log.exception("contact-failed")
            error = repr(exc)
        with self._lock:
            self._error = error
            if not error:
                self._answered_at = self._clock.monotonic()
