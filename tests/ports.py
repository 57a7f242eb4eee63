"""Ports for what a test starts a moment later: some that the kernel gives to nobody itself."""

from __future__ import annotations

import random
import socket
from typing import Final

__all__ = ["free_port"]

_PORTS: Final = range(23_000, 32_000)


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
