"""On which machines a spool was used: its disk may be attached to another one when a node is gone.

It owns the rule that a spool stays the same member wherever it is, so that what it had begun it can
finish. Any thread.
"""

from __future__ import annotations

import json
import logging

from ckptgate.engine.events import Events
from ckptgate.ports.spool import Spool

__all__ = ["known_hosts", "note_host"]

_log = logging.getLogger(__name__)

_FIRST_META = "host"
"""Setting with the host that the spool was made on."""
_HOSTS_META = "hosts"
"""Setting with all hosts that it was used on after that, oldest first, as a JSON list."""


def known_hosts(spool: Spool) -> list[str]:
    """The hosts that the spool was used on, in order."""
    first = spool.get_meta(_FIRST_META)
    later: list[str] = json.loads(spool.get_meta(_HOSTS_META) or "[]")
    return [*([first] if first else []), *later]


def note_host(spool: Spool, host: str, events: Events) -> bool:
    """Note that *host* uses the spool from now on; True (and an incident) if another one did."""
    known = known_hosts(spool)
    if known and known[-1] == host:
        return False
    later = [*known[1:], host] if known else [host]
    spool.set_meta(_HOSTS_META, json.dumps(later))
    if not known:
        return False
    member = spool.get_meta("member") or ""
    detail = f"it was last used on {known[-1]}; {host} goes on with it as the same member {member}"
    events.record("spool-moved", spool.path, detail)
    return True
