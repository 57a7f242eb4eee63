"""Logging of the daemon: one line a state change, `event key=value`, to standard error."""

from __future__ import annotations

import logging
import sys
from typing import Final

__all__ = ["configure_logging"]

_CLIENTS: Final = ("aiobotocore", "aiohttp", "asyncio", "botocore", "fsspec", "s3fs", "urllib3")
"""At DEBUG these write requests with their headers, a session's token among them."""


def configure_logging(level: str, *, process: str) -> None:
    """Send the log to standard error; the supervisor's parent points that at the log file."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s %(levelname)s {process} %(name)s %(message)s",
        force=True,
    )
    for name in _CLIENTS:
        logging.getLogger(name).setLevel(logging.WARNING)
