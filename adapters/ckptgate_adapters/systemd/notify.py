"""What a service and systemd tell each other: sd_notify(3), the watchdog, the descriptor store.

Owns the rule that none of it is ever needed: where no service manager listens every call says so
and does nothing, and a message that cannot be sent is logged and costs the service nothing. Only
the service's main process is listened to (`NotifyAccess=main`). Any thread.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import Final

__all__ = ["FIRST_FD", "has_manager", "notify", "received_fds", "watchdog_s"]

_log = logging.getLogger(__name__)

FIRST_FD: Final = 3
"""Descriptors that the manager gives begin here (SD_LISTEN_FDS_START)."""
_STATUS_CHARS_MAX: Final = 400


def has_manager() -> bool:
    """Whether a service manager wants to be told of this process."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(*fields: str, fds: Sequence[int] = ()) -> bool:
    """Tell the service manager: `READY=1`, `STATUS=...`, `WATCHDOG=1`, `FDSTORE=1`, ...

    Args:
        fields: assignments; what would end a line in one of them is made a space.
        fds: descriptors that go along, for `FDSTORE=1`.

    Returns:
        Whether it was sent.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    message = "\n".join(_line(field) for field in fields).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(address)
            if fds:
                socket.send_fds(channel, [message], list(fds))
            else:
                channel.sendall(message)
    except OSError as exc:
        _log.warning("notify-failed socket=%r error=%s", address, exc)
        return False
    return True


def _line(field: str) -> str:
    name, _, value = field.partition("=")
    value = " ".join(value.split())
    if len(value) > _STATUS_CHARS_MAX:
        value = value[: _STATUS_CHARS_MAX - 3] + "..."
    return f"{name}={value}"


def watchdog_s() -> float | None:
    """Within how many seconds the manager wants `WATCHDOG=1`, again and again; None: never."""
    try:
        limit_s = int(os.environ.get("WATCHDOG_USEC", "")) / 1e6
        is_ours = int(os.environ.get("WATCHDOG_PID", "") or os.getpid()) == os.getpid()
    except ValueError:
        return None
    return limit_s if is_ours and limit_s > 0 else None


def received_fds() -> dict[str, list[int]]:
    """Descriptors that the manager kept for the service, by the name they were stored under.

    They are made close-on-exec. Empty where there are none, or where they are another process's.
    """
    try:
        if int(os.environ.get("LISTEN_PID", "")) != os.getpid():
            return {}
        count = int(os.environ.get("LISTEN_FDS", ""))
    except ValueError:
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, list[int]] = {}
    for i in range(count):
        fd = FIRST_FD + i
        os.set_inheritable(fd, False)
        found.setdefault(names[i] if i < len(names) else "", []).append(fd)
    return found
