"""System calls out of the text that strace writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CALLS", "Call", "calls", "decoded"]

CALLS = (
    "openat,open,creat,close,dup,dup2,dup3,write,pwrite64,pwritev,pwritev2,writev,ftruncate,"
    "truncate,fallocate,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,link,linkat,"
    "symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,copy_file_range,sendfile,ioctl"
)
_LINE = re.compile(r"^(\d+) +(.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+|\?)(?:.*)$", re.DOTALL)
_RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
_IGNORED = ("---", "+++")


@dataclass
class Call:
    """One finished system call; it began after the call number `began` had ended."""

    name: str
    arguments: list[str]
    result: int
    began: int


def calls(trace: Path) -> Iterator[Call]:
    """The calls of `strace -f -xx -s 1000000 -o TRACE`, in the order in which they ended."""
    waiting: dict[str, tuple[str, int]] = {}
    count = 0
    with open(trace, encoding="ascii") as stream:
        for line in stream:
            match = _LINE.match(line.rstrip("\n"))
            if match is None or match[2].startswith(_IGNORED):
                continue
            pid, text, began = match[1], match[2], count
            if text.endswith(" <unfinished ...>"):
                waiting[pid] = text.removesuffix(" <unfinished ...>"), count
                continue
            resumed = _RESUMED.match(text)
            if resumed is not None:
                begun, began = waiting.pop(pid)
                text = begun + resumed[2]
            done = _CALL.match(text)
            if done is None or done[3] == "?":
                continue
            count += 1
            yield Call(done[1], _split(done[2]), int(done[3]), began)


def _split(text: str) -> list[str]:
    """Arguments; strings are hex, so no comma is inside of one."""
    found: list[str] = []
    depth = 0
    for part in re.split(r"([,\[\]{}])", text):
        if part == "," and not depth:
            found.append("")
            continue
        depth += (part in "[{" and bool(part)) - (part in "]}" and bool(part))
        if not found:
            found.append("")
        found[-1] += part
    return [item.strip() for item in found]


def decoded(text: str) -> bytes:
    """The bytes of a string argument."""
    assert text.startswith('"'), text[:80]
    assert text.endswith('"'), f"cut by strace: {text[-40:]}"
    return bytes.fromhex(text[1:-1].replace("\\x", ""))
