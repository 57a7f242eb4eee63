"""Logging of the daemon: one line a state change, `event key=value`, to standard error."""

from __future__ import annotations

import logging
import sys

__all__ = ["configure_logging"]


def configure_logging(level: str, *, process: str) -> None:
    """Send the log to standard error; the supervisor's parent points that at the log file."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s %(levelname)s {process} %(name)s %(message)s",
        force=True,
    )
