"""Asking the daemon of a mount, also while its publisher is being started again.

Owns the rule: as long as the supervisor lives somebody will answer, so a command doesn't fail only
because the publisher has just died. One that is stopped is told at once. Every request may be
repeated. Any thread.
"""

from __future__ import annotations

import time
from typing import Any, Final

from ckptgate.app.reach import stopped_child, within_reach
from ckptgate.app.registry import MountInfo
from ckptgate.errors import UnusableError
from ckptgate_adapters.channels import control_call

__all__ = ["ask"]

_RESTART_S: Final = 10.0
"""A publisher that isn't back by then doesn't come back by itself."""
_PAUSE_S: Final = 0.2


def ask(mount: MountInfo, request: dict[str, Any], *, timeout_s: float = 60.0) -> Any:
    """The daemon's result.

    Args:
        mount: whose.
        request: with its `op`.
        timeout_s: how long one answer may take.

    Raises:
        UnusableError: the mount is gone, its publisher is stopped, or nothing answers.
        RemoteError: what the daemon answered.
    """
    deadline = time.monotonic() + _RESTART_S
    while True:
        try:
            return within_reach(
                lambda: control_call(mount.spool, request, timeout_s=timeout_s),
                mounts=lambda: [mount],
                child="publisher",
                limit_s=timeout_s + _PAUSE_S,
            )
        except UnusableError:
            is_stopped = stopped_child(mount, "publisher") is not None
            if not mount.is_alive or is_stopped or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)
