"""Entry point of the two child processes: `python -m ckptgate.app.child KIND SPOOL PARENT ...`.

Started by the supervisor only (`children`), which gives the configuration on standard input, and
told of its supervisor's death: without one, nothing would start the other child again.
"""

from __future__ import annotations

import ctypes
import os
import sys

from ckptgate.app.children import ORPHANED
from ckptgate.app.config import MAX_CONFIG_BYTES, parse_saved_config
from ckptgate.app.logs import configure_logging

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def _hear_of_parent(parent: int) -> None:
    """Be told of the supervisor's death, and end if it died before this."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ORPHANED)
    if os.getppid() != parent:
        sys.exit(1)


def main(argv: list[str]) -> int:
    """Run one child; returns its exit code."""
    name, _spool, parent, *rest = argv
    _hear_of_parent(int(parent))
    config = parse_saved_config(sys.stdin.buffer.read(MAX_CONFIG_BYTES), "standard input")
    configure_logging(config.log_level, process=name, form=config.log.format)
    if name == "clients":
        from ckptgate.app.client_process import run_clients  # noqa: PLC0415 - only what it needs

        return run_clients(config, int(rest[0]), float(rest[1]))
    *numbers, is_kept = (int(text) for text in rest)
    if name == "mount":
        from ckptgate.app.mount_process import run_mount  # noqa: PLC0415 - only what it needs

        ready_fd, device = numbers
        return run_mount(config, device, ready_fd, is_kept=bool(is_kept))
    from ckptgate.app.publisher_process import run_publisher  # noqa: PLC0415 - only what it needs

    return run_publisher(config, is_kept=bool(is_kept))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
