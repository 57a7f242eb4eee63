"""`mount.ckptgate SPEC DIR [-sfnv] [-o OPTIONS]`: what mount(8) and /etc/fstab call.

Translates mount options into those of `ckptgate mount` and ends as mount(8) expects it: 0, 1 for
wrong usage, 32 for a mount that failed. Options that other programs read (`_netdev`, `nofail`,
`x-systemd.*`, ...) are none of its business.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ckptgate.app import cli
from ckptgate.errors import UsageError

__all__ = ["main", "mount_words"]

_USAGE: Final = 1
_FAILED: Final = 32
_OWN: Final = {
    "config": "--config",
    "spool": "--spool",
    "spool_max": "--spool-max",
    "endpoint_url": "--endpoint-url",
    "profile": "--profile",
    "region": "--region",
}
_IGNORED: Final = frozenset({
    "_netdev", "allow_other", "async", "atime", "auto", "comment", "default_permissions",
    "defaults", "diratime", "exec", "group", "iversion", "lazytime", "noatime", "noauto", "nodev",
    "nodiratime", "nofail", "nolazytime", "norelatime", "nostrictatime", "nosuid", "nouser",
    "owner", "relatime", "rw", "strictatime", "user", "users",
})  # fmt: skip
"""What the gateway does anyway, and what is for others."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """What the words say."""

    places: list[str] = field(default_factory=list[str])
    options: list[str] = field(default_factory=list[str])
    flags: set[str] = field(default_factory=set[str])


def main(argv: Sequence[str] | None = None) -> int:
    """Mount; returns the exit code."""
    logging.basicConfig(format="mount.ckptgate: %(message)s", level=logging.WARNING)
    try:
        words, is_fake = mount_words(list(sys.argv[1:] if argv is None else argv))
    except UsageError as exc:
        print(f"mount.ckptgate: {exc.message}", file=sys.stderr)
        if exc.hint:
            print(f"  hint: {exc.hint}", file=sys.stderr)
        return _USAGE
    if is_fake:
        return 0
    return _FAILED if cli.main(["mount", *words]) else 0


def mount_words(argv: list[str]) -> tuple[list[str], bool]:
    """The words of `ckptgate mount`, and whether nothing is to be done (`-f`).

    Raises:
        UsageError: an option is unknown, or means what can't be.
    """
    call = _parse(argv)
    if len(call.places) != 2:
        msg = "a store and a directory are needed"
        raise UsageError(msg, hint="mount -t ckptgate /nfs/checkpoints /mnt/checkpoints")
    words: list[str] = []
    for option in call.options:
        words += _words_of(option, is_sloppy="s" in call.flags)
    store, mountpoint = call.places
    # What fstab has in the place of a store that only the file names.
    if store not in {"none", "ckptgate"}:
        words.append(store)
    return [*words, mountpoint], "f" in call.flags


def _parse(argv: list[str]) -> _Call:
    call = _Call()
    rest = iter(argv)
    for word in rest:
        if word in {"-o", "-t", "-N"}:
            value = next(rest, None)
            if value is None or word == "-N":
                msg = f"{word} is not understood" if value is not None else f"{word} needs a value"
                raise UsageError(msg, subject=word)
            if word == "-o":
                call.options += _split(value)
        elif word.startswith("-") and word != "-":
            flags = set(word[1:])
            if not flags <= set("sfnvwr") or "r" in flags:
                msg = f"{word} is not understood"
                raise UsageError(
                    msg, subject=word, hint="a checkpoint gateway is mounted read-write"
                )
            call.flags |= flags
        else:
            call.places.append(word)
    return call


def _split(text: str) -> list[str]:
    """At commas, but for those in quotes."""
    parts, is_quoted = [""], False
    for mark in text:
        if mark == '"':
            is_quoted = not is_quoted
        elif mark == "," and not is_quoted:
            parts.append("")
        else:
            parts[-1] += mark
    return [part for part in parts if part]


def _words_of(option: str, *, is_sloppy: bool) -> list[str]:
    name, mark, value = option.partition("=")
    if name in _OWN and value:
        return [_OWN[name], value]
    is_others = name.startswith(("x-", "X-")) or name in _IGNORED
    if is_others or (is_sloppy and name not in {"ro", "remount", "bind"}):
        return []
    msg = f"the mount option {option!r} is not known"
    if name in _OWN:
        msg = f"the mount option {name} needs a value"
    elif name in {"ro", "remount", "bind", "rbind", "move"}:
        msg = f"a checkpoint gateway cannot be mounted with {name}{mark and ' '}{value}".rstrip()
    raise UsageError(msg, subject=option, hint=f"options: {', '.join(_OWN)}")
