"""When the store last answered, kept in the spool, where whoever watches the daemon finds it.

It owns the rule what "away" means: a request failed in a way that passes, and none has succeeded
since. An outage is one incident when it begins and one when it ends, however many attempts wait;
nothing is given up because of it. Where nothing else is asked of the store a small request is made
now and then, so that an outage is told before a save meets it.

Thread rule: the publisher's one thread; `Contact` is a value.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from ckptgate.engine.node import Node
from ckptgate.errors import CkptError, MissingError, TransientStoreError, UnusableError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES
from ckptgate.model.layout import format_key
from ckptgate.ports.spool import CONTACT_META, Contact

__all__ = ["StoreContact"]

_log = logging.getLogger(__name__)

_AWAY_INTERVAL_S: Final = 5.0
"""Between requests while it is away."""


class StoreContact:
    """Asks, notes and tells."""

    def __init__(self, node: Node) -> None:
        self._store = node.store
        self._spool = node.spool
        self._clock = node.clock
        self._events = node.events
        self._interval_s = node.settings.contact_interval_s
        self._asked_s: float | None = None
        self._is_away = bool(self._known().away_ns)

    def step(self) -> bool:
        """Ask the store, if it is time to; never any work, so False."""
        if not self._is_due():
            return False
        self._asked_s = self._clock.monotonic()
        try:
            self._store.get(format_key(""), limit=MAX_DOCUMENT_BYTES)
        except (TransientStoreError, UnusableError) as exc:
            self.failed(exc)
            return False
        except MissingError:
            pass
        except CkptError as exc:
            # Whatever it says, it is there.
            _log.info("store-odd error=%s", exc)
        self._answered()
        return False

    def _is_due(self) -> bool:
        if not self._is_away and self._interval_s <= 0:
            return False
        pause_s = _AWAY_INTERVAL_S if self._is_away else self._interval_s
        return self._asked_s is None or self._clock.monotonic() - self._asked_s >= pause_s

    def failed(self, error: CkptError) -> None:
        """A request failed because the store isn't there."""
        if self._is_away:
            return
        self._is_away = True
        self._asked_s = self._clock.monotonic()
        known = self._known()
        self._keep(
            Contact(
                answered_ns=known.answered_ns,
                away_ns=self._clock.now_ns(),
                error=str(error),
            )
        )
        detail = f"{error}; what is staged stays in the spool and goes on when it is back"
        self._events.record("store-away", self._store.url, detail)

    def _answered(self) -> None:
        known, now_ns = self._known(), self._clock.now_ns()
        self._is_away = False
        self._keep(Contact(answered_ns=now_ns))
        if known.away_ns:
            away_s = max(0.0, (now_ns - known.away_ns) / 1e9)
            self._events.record("store-back", self._store.url, f"it was away for {away_s:.0f} s")

    def _known(self) -> Contact:
        return Contact.parse(self._spool.get_meta(CONTACT_META))

    def _keep(self, contact: Contact) -> None:
        try:
            self._spool.set_meta(CONTACT_META, msgspec.json.encode(contact).decode())
        except CkptError as exc:
            _log.warning("contact-not-kept error=%s", exc)
