"""The list of cases and what they work with.

A case is a function that is called in a fresh, empty working directory and returns what it saw as a
dictionary of plain values: results, names of errnos, relations between attributes. Nothing that
differs from run to run (inode numbers, times) is in it, so two file systems can be compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["CASES", "NOBODY", "as_user", "case", "err", "forked", "later", "opened", "put", "run"]

Observation = dict[str, Any]
CASES: dict[str, Callable[[], Observation]] = {}
NOBODY = 65534
CASE_TIMEOUT_S = 60


def case(function: Callable[[], Observation]) -> Callable[[], Observation]:
    """Add a function to the suite."""
    assert function.__name__ not in CASES, function.__name__
    CASES[function.__name__] = function
    return function


def err(call: Callable[..., Any], *args: Any, **more: Any) -> str:
    """`ok`, or the name of the errno with which the call fails."""
    try:
        call(*args, **more)
    except OSError as exc:
        return errno.errorcode.get(exc.errno or 0, str(exc.errno))
    return "ok"


def put(path: str, data: bytes = b"", mode: int = 0o644) -> None:
    """Write a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def get(path: str) -> str:
    """A small file's bytes as text."""
    with open(path, "rb") as stream:
        return stream.read().decode("latin-1")


@contextlib.contextmanager
def opened(path: str, flags: int = os.O_RDWR | os.O_CREAT, mode: int = 0o644) -> Iterator[int]:
    """An open file."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def later() -> None:
    """Wait until every clock that time stamps come from has moved."""
    time.sleep(0.012)


def forked(call: Callable[[], Any]) -> Any:
    """What *call* returns in a forked child; its error as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            answer = call()
        except BaseException as exc:  # noqa: BLE001 - the parent gets it as text
            answer = f"raised {exc!r}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        raw = stream.read()
    os.waitpid(pid, 0)
    return json.loads(raw)


def as_user(call: Callable[[], Any], uid: int = NOBODY, gid: int = NOBODY, *groups: int) -> Any:
    """The same as another user."""

    def lowered() -> Any:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        return call()

    return forked(lowered)


def _timed_out(_number: int, _frame: Any) -> None:
    raise TimeoutError(errno.ETIMEDOUT, "the case takes too long")


def run(
    directory: str, names: list[str], seconds: dict[str, float] | None = None
) -> dict[str, Observation]:
    """Do the cases below *directory*, each in a directory of its own."""
    signal.signal(signal.SIGALRM, _timed_out)
    os.umask(0o022)
    found: dict[str, Observation] = {}
    for name in names:
        here = f"{directory}/{name}"
        started = time.monotonic()
        try:
            os.mkdir(here, 0o755)
            os.chdir(here)
            signal.alarm(CASE_TIMEOUT_S)
            found[name] = CASES[name]()
        except Exception as exc:  # noqa: BLE001 - compared like any other result
            found[name] = {"raised": repr(exc), "at": traceback.format_exc()}
        finally:
            signal.alarm(0)
            if seconds is not None:
                seconds[name] = time.monotonic() - started
            os.umask(0o022)
            os.chdir(directory)
    return found


def main() -> None:
    """`runner DIRECTORY RESULT [CASE...]`."""
    directory, result, *names = sys.argv[1:]
    seconds: dict[str, float] = {}
    found = run(directory, names or list(CASES), seconds)
    os.chdir("/")
    with open(result, "w", encoding="utf-8") as stream:
        json.dump(found, stream)
    print(f"{len(found)} cases in {sum(seconds.values()):.1f} s, the slowest:")
    for name in sorted(seconds, key=lambda name: -seconds[name])[:8]:
        print(f"{seconds[name]:8.2f} s  {name}")
