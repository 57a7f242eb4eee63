"""`commit`, `abort`, `wait`: decisions about checkpoints of a mount on this node."""

from __future__ import annotations

import argparse
import os
import pwd
import sys
import time
from typing import Any, Final

from ckptgate.app.asking import ask
from ckptgate.app.commands.output import add_json, print_json
from ckptgate.app.left import told
from ckptgate.app.locate import Place, locate_in_mount, locate_served
from ckptgate.app.registry import MountInfo
from ckptgate.errors import (
    CkptError,
    ErrorKind,
    ExitCode,
    PendingError,
    RefusedError,
    UsageError,
)

__all__ = ["add_commands"]

_ANSWER_TIMEOUT_S: Final = 60.0
_ANSWER_MIN_S: Final = 1.0
"""However little time is left of a `--timeout`."""
_PAUSE_S: Final = 0.1
_GIVEN_UP: Final = frozenset({"aborted", "abandoned"})


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    commit = commands.add_parser("commit", help="say that ranks wrote all of a checkpoint")
    commit.add_argument("path", metavar="PATH", help="the checkpoint directory, in a mount")
    commit.add_argument("--rank", type=int, metavar="R")
    commit.add_argument("--world-size", type=int, metavar="W")
    commit.add_argument("--all", action="store_true", help="for all ranks at once")
    commit.add_argument("--wait", action="store_true", help="until it is decided")
    commit.add_argument("--timeout", type=float, default=None, metavar="S")
    add_json(commit)
    commit.set_defaults(handler=_commit)
    abort = commands.add_parser("abort", help="give an unfinished checkpoint up")
    abort.add_argument("path", metavar="PATH")
    abort.add_argument("--reason", default="", metavar="TEXT")
    add_json(abort)
    abort.set_defaults(handler=_abort)
    wait = commands.add_parser("wait", help="until a checkpoint, or all of a run, is decided")
    wait.add_argument("path", metavar="PATH", help="a checkpoint, a run, or the mount point")
    wait.add_argument("--timeout", type=float, default=None, metavar="S")
    add_json(wait)
    wait.set_defaults(handler=_wait)


def _ask(
    at: tuple[Place, MountInfo], op: str, *, timeout_s: float = _ANSWER_TIMEOUT_S, **more: Any
) -> Any:
    place, mount = at
    request = {"op": op, "run": place.run, "name": place.name, **more}
    return ask(mount, request, timeout_s=timeout_s)


def _commit(args: argparse.Namespace) -> int:
    if args.all == (args.rank is not None) or (args.rank is None) != (args.world_size is None):
        msg = "commit takes --rank R --world-size W, or --all"
        raise UsageError(msg, subject=args.path)
    at = locate_in_mount(args.path)
    result = _ask(at, "commit", rank=args.rank, world_size=args.world_size, all=args.all)
    torn: list[str] = result["torn"]
    for path in torn:
        print(
            f"ckptgate: warning: the writer of {path!r} died with it open: "
            "it is taken as it is, as a commit says that all was written",
            file=sys.stderr,
        )
    if torn:
        hint = f"ckptgate abort {args.path}, or write it again before the commit is decided"
        print(f"  hint: {hint}", file=sys.stderr)
    if args.wait:
        result = {**_wait_decided(at, args.timeout), "torn": torn}
    _print(args, result, f"{at[0].name}: recorded")
    return ExitCode.OK


def _abort(args: argparse.Namespace) -> int:
    result = _ask(locate_in_mount(args.path), "abort", reason=args.reason, by=_who())
    _print(args, result, f"{result['name']}: {result['state']}")
    return ExitCode.OK


def _who() -> str:
    """The person behind this command: for the log, nobody is let in by it."""
    if name := os.environ.get("SUDO_USER"):
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def _wait(args: argparse.Namespace) -> int:
    found = _wait_for_run(args.path, args.timeout)
    if found is not None:
        if args.json:
            print_json(found)
        else:
            for row in found["last"]:
                print(f"{row['run'] or '/'}/{row['name']}: {row['state']}")
        return ExitCode.OK
    result = _wait_decided(locate_in_mount(args.path), args.timeout)
    _print(args, result, "")
    return ExitCode.OK


def _wait_for_run(path: str, timeout_s: float | None) -> dict[str, Any] | None:
    """A run's state once nothing in it is undecided on this node; None if *path* is no run.

    Raises:
        RefusedError: what was decided last in one of the runs was an abort.
        PendingError: something is undecided at the end of that time.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    served = locate_served(path)
    while True:
        try:
            found: dict[str, Any] = ask(served.mount, {"op": "run", "path": served.below})
        except CkptError as exc:
            if exc.kind is ErrorKind.NOT_FOUND:
                return None
            raise
        if not found["undecided"]:
            break
        if deadline is not None and time.monotonic() >= deadline:
            lines = "".join(f"\n  {told(row)}" for row in found["undecided"])
            msg = f"{path}: not decided after {timeout_s:g} s:{lines}"
            raise PendingError(msg, subject=path, hint=f"ckptgate status {path}")
        time.sleep(_PAUSE_S)
    refused = [row for row in found["last"] if row["state"] in _GIVEN_UP]
    if refused:
        lines = "".join(f"\n  {told(row)}" for row in refused)
        msg = f"{path}: the last checkpoint was not committed:{lines}"
        raise RefusedError(msg, subject=path, hint=f"ckptgate status {path}")
    return found


def _print(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    if args.json:
        print_json(result)
    else:
        print(f"{result['name']}: {result['state']}" if "reason" in result else text)


def _wait_decided(at: tuple[Place, MountInfo], timeout_s: float | None) -> dict[str, Any]:
    """The state once it is decided.

    Raises:
        RefusedError: aborted or abandoned.
        PendingError: not decided in time.
        UnusableError: the daemon does not answer.
    """
    place, _ = at
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = _ANSWER_TIMEOUT_S if deadline is None else deadline - time.monotonic()
        answer_s = min(max(left_s, _ANSWER_MIN_S), _ANSWER_TIMEOUT_S)
        found: dict[str, Any] = _ask(at, "state", timeout_s=answer_s)
        if found["state"] in {"committed", "replaced"}:
            return found
        if found["state"] in _GIVEN_UP:
            missing = "".join(f"\n  missing: {line}" for line in found["missing"])
            msg = f"{place.name} was {found['state']}: {found['reason']}{missing}"
            raise RefusedError(msg, subject=place.name)
        if deadline is not None and time.monotonic() >= deadline:
            missing = "; ".join(filter(None, (found["reason"], *found["missing"])))
            missing = missing or "not decided yet"
            msg = f"{place.name} is {found['state']} after {timeout_s:g} s: {missing}"
            raise PendingError(msg, subject=place.name, hint="ckptgate status")
        time.sleep(_PAUSE_S)
