"""Durations, sizes and addresses as people write them: `90s`, `7d`; `2TB`; `[::1]:9469`. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

__all__ = ["FOREVER", "parse_bytes", "parse_listen", "parse_seconds"]

FOREVER: Final = "forever"
"""A duration that never ends."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES: Final = {
    "": 1,
    "b": 1,
    **{f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)},
    **{f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)},
}
_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")


def parse_seconds(text: str) -> float:
    """The seconds that *text* says; infinity for `forever`.

    Raises:
        ValueError: it is no duration.
    """
    if text == FOREVER:
        return float("inf")
    found = _NUMBER.fullmatch(text.strip())
    if found is None or found[2].lower() not in _SECONDS:
        msg = f"{text!r} is no duration (such as 90s, 30m, 24h, 7d, {FOREVER})"
        raise ValueError(msg)
    return float(found[1]) * _SECONDS[found[2].lower()]


def parse_bytes(text: str) -> int:
    """The bytes that *text* says.

    Raises:
        ValueError: it is no size.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None or found[2].lower() not in _BYTES:
        msg = f"{text!r} is no size (such as 500GiB, 2TB)"
        raise ValueError(msg)
    return int(float(found[1]) * _BYTES[found[2].lower()])


def parse_listen(text: str) -> tuple[str, int]:
    """The IP address and port that *text* says.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    number = int(port) if colon and port.isdecimal() else -1
    try:
        address = str(ipaddress.ip_address(host))
    except ValueError:
        address, number = "", -1
    if not 0 <= number < 65536:
        msg = f"{text!r} is no address and port (such as 127.0.0.1:9469)"
        raise ValueError(msg)
    return address, number
