"""Whether the store answers: asked, remembered and told in one place.

It owns two rules. "Away" means that a request failed in a way that passes, and that none has
succeeded since: an outage is one incident when it begins and one when it ends, however many
attempts wait, and nothing is given up because of it. And who asks for metrics or health never hangs
with the store: a request that doesn't come back (a dead NFS server) is left alone, and as long as
it hasn't, nobody makes another one for them.

What the publisher reads anyway counts; where nothing else is asked of the store a small request is
made now and then, so that an outage is told before a save meets it. What is known is kept in the
spool, too, where whoever watches the daemon finds it.

Thread rule: `look` on any thread, all else on the publisher's one; `Contact` is a value.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Final

import msgspec

from ckptgate.engine.node import Node
from ckptgate.errors import CkptError, MissingError, TransientStoreError, UnusableError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES
from ckptgate.model.layout import format_key
from ckptgate.ports.spool import CONTACT_META, Contact

__all__ = ["Reached", "StoreContact"]

_log = logging.getLogger(__name__)

_AWAY_INTERVAL_S: Final = 5.0
"""Between requests while it is away."""
_RECENT_S: Final = 15.0
"""An answer counts for so long."""
_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What is known.

    Attributes:
        is_reached: it answered lately, and no request has failed since.
        age_s: since it last answered, None if it never did.
        error: what it said instead, "" for nothing yet.
    """

    is_reached: bool
    age_s: float | None
    error: str


class StoreContact:
    """Asks, remembers and tells."""

    def __init__(self, node: Node) -> None:
        self._store = node.store
        self._logs = node.logs
        self._spool = node.spool
        self._clock = node.clock
        self._events = node.events
        self._interval_s = node.settings.contact_interval_s
        # The publisher's thread alone: what the spool says, or would if it could be written.
        self._noted = Contact.parse(self._spool.get_meta(CONTACT_META))
        self._noted_answer_s: float | None = None
        self._lock = threading.Lock()
        self._asked_s: float | None = None
        self._answered_s: float | None = None
        self._failed_s: float | None = None
        self._error = ""
        self._asking: threading.Thread | None = None

    def step(self) -> bool:
        """Ask the store, if it is time to; tell what is new. Never any work, so False."""
        if self._is_due():
            self._ask()
        with self._lock:
            error, answered_s = self._error, self._answered_s
        if error:
            self._note_away(error)
        elif answered_s is not None:
            self._note_answer(answered_s)
        return False

    def failed(self, error: CkptError) -> None:
        """A request failed because the store isn't there."""
        text = str(error) or repr(error)
        with self._lock:
            if not self._noted.away_ns:
                # Where it is away already the next question is not to be put off.
                self._asked_s = self._clock.monotonic()
            self._failed_s, self._error = self._clock.monotonic(), text
        self._note_away(text)

    def look(self, *, wait_s: float = _WAIT_S) -> Reached:
        """What is known after waiting up to *wait_s* for an answer, where one is needed."""
        now = self._reached()
        if now.is_reached:
            return now
        with self._lock:
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(target=self._ask_aside, name="contact", daemon=True)
                self._asking.start()
            asking = self._asking
        asking.join(wait_s)
        return self._reached()

    def _is_due(self) -> bool:
        is_away = bool(self._noted.away_ns)
        if not is_away and self._interval_s <= 0:
            return False
        pause_s = _AWAY_INTERVAL_S if is_away else self._interval_s
        asked_s = self._asked_s
        return asked_s is None or self._clock.monotonic() - asked_s >= pause_s

    def _reached(self) -> Reached:
        """As of now, by the answers of all who asked."""
        ages = [age for log in self._logs.known() if (age := log.age_s()) is not None]
        now_s = self._clock.monotonic()
        with self._lock:
            if self._answered_s is not None:
                ages.append(now_s - self._answered_s)
            failed_s, error = self._failed_s, self._error
        age_s = min(ages, default=None)
        is_reached = (
            age_s is not None
            and age_s < _RECENT_S
            and (failed_s is None or age_s <= now_s - failed_s)
        )
        return Reached(is_reached=is_reached, age_s=age_s, error="" if is_reached else error)

    def _ask_aside(self) -> None:
        try:
            self._ask()
        except Exception as exc:  # noqa: BLE001 -- the thread's outermost edge
            _log.exception("contact-failed")
            self._remember(repr(exc))

    def _ask(self) -> None:
        """A small request, and what came of it."""
        with self._lock:
            self._asked_s = self._clock.monotonic()
        error = ""
        try:
            self._store.get(format_key(""), limit=MAX_DOCUMENT_BYTES)
        except (TransientStoreError, UnusableError) as exc:
            error = str(exc) or repr(exc)
        except MissingError:
            pass
        except CkptError as exc:
            # Whatever it says, it is there.
            _log.info("store-odd error=%s", exc)
        self._remember(error)

    def _remember(self, error: str) -> None:
        now_s = self._clock.monotonic()
        with self._lock:
            self._error = error
            if error:
                self._failed_s = now_s
            else:
                self._answered_s = now_s

    def _note_away(self, error: str) -> None:
        if self._noted.away_ns:
            return
        now_ns = self._clock.now_ns()
        self._keep(Contact(answered_ns=self._noted.answered_ns, away_ns=now_ns, error=error))
        detail = f"{error}; what is staged stays in the spool and goes on when it is back"
        self._events.record("store-away", self._store.url, detail)

    def _note_answer(self, answered_s: float) -> None:
        """Now and then, and when it is back."""
        before, known_s, now_s = self._noted, self._noted_answer_s, self._clock.monotonic()
        is_due = known_s is None or now_s - known_s >= max(self._interval_s, _RECENT_S)
        if not before.away_ns and (not is_due or answered_s == known_s):
            return
        self._noted_answer_s = answered_s
        age_ns = int((now_s - answered_s) * 1e9)
        answered_ns = self._clock.now_ns() - age_ns
        self._keep(Contact(answered_ns=answered_ns))
        if before.away_ns:
            away_s = max(0.0, (answered_ns - before.away_ns) / 1e9)
            self._events.record("store-back", self._store.url, f"it was away for {away_s:.0f} s")

    def _keep(self, contact: Contact) -> None:
        self._noted = contact
        try:
            self._spool.set_meta(CONTACT_META, msgspec.json.encode(contact).decode())
        except CkptError as exc:
            _log.warning("contact-not-kept error=%s", exc)
