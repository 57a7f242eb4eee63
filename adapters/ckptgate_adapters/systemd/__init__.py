"""systemd: the service protocol, and the files of the service.

`notify` speaks it; `files/` has the unit and what belongs to it, which `ckptgate service install`
puts in place.
"""

from ckptgate_adapters.systemd.notify import has_manager, notify, received_fds, watchdog_s

__all__ = ["has_manager", "notify", "received_fds", "watchdog_s"]
