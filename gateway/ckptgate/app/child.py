"""Entry point of the two child processes: `python -m ckptgate.app.child KIND SPOOL PARENT ...`.

Started by the supervisor only. A child ends with its supervisor: without one, nothing would start
the other child again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from ckptgate.app.config import read_saved_config
from ckptgate.app.logs import configure_logging

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def _end_with_parent(parent: int) -> None:
    """Be told of the supervisor's death, and end if it died before this."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


def main(argv: list[str]) -> int:
    """Run one child; returns its exit code."""
    name, spool, parent, *rest = argv
    _end_with_parent(int(parent))
    config = read_saved_config(spool)
    configure_logging(config.log_level, process=name, form=config.log.format)
    if name == "mount":
        from ckptgate.app.mount_process import run_mount  # noqa: PLC0415 - only what it needs

        device, ready_fd = (int(text) for text in rest)
        return run_mount(config, device, ready_fd)
    from ckptgate.app.publisher_process import run_publisher  # noqa: PLC0415 - only what it needs

    return run_publisher(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
