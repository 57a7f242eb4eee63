"""`commit`, `abort`, `wait`: decisions about checkpoints, for the most of a mount on this node."""

from __future__ import annotations

import argparse
import os
import pwd
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ckptgate.app.asking import ask
from ckptgate.app.commands.options import add_store_options, store_options
from ckptgate.app.commands.output import add_json, print_json
from ckptgate.app.left import named, told
from ckptgate.app.locate import Place, locate_in_mount, locate_served, may_be_unserved
from ckptgate.app.registry import MountInfo
from ckptgate.app.sections import S3Section
from ckptgate.errors import (
    CkptError,
    ErrorKind,
    ExitCode,
    PendingError,
    RefusedError,
    UsageError,
)
from ckptgate.model.ids import split_attempt_id
from ckptgate.model.states import UNDECIDED

if TYPE_CHECKING:
    from ckptgate.engine.overview import Overview

__all__ = ["add_commands"]

_ANSWER_TIMEOUT_S: Final = 60.0
_ANSWER_MIN_S: Final = 1.0
"""However little time is left of a `--timeout`."""
_PAUSE_S: Final = 0.1
_STORE_PAUSE_S: Final = 2.0
"""Each look at a store costs requests."""
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
    where = "a checkpoint, a run, or the mount point; or those in a store that isn't mounted here"
    wait.add_argument("path", metavar="PATH", help=where)
    wait.add_argument("--timeout", type=float, default=None, metavar="S")
    add_store_options(wait)
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
    found = _wait_in_store(args.path, store_options(args), args.timeout)
    if found is None:
        found = _wait_for_run(args.path, args.timeout)
    if found is not None:
        if args.json:
            print_json(found)
        else:
            for row in found["last"]:
                print(f"{named(row)}: {row['state']}")
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
    served = locate_served(path)

    def look() -> dict[str, Any]:
        found: dict[str, Any] = ask(served.mount, {"op": "run", "path": served.below})
        return found

    try:
        found = look()
    except CkptError as exc:
        if exc.kind is ErrorKind.NOT_FOUND:
            return None
        raise
    return _wait_until(path, found, look, pause_s=_PAUSE_S, timeout_s=timeout_s)


def _wait_in_store(path: str, s3: S3Section, timeout_s: float | None) -> dict[str, Any] | None:
    """As `_wait_for_run`, of what the store knows where no daemon here serves it; else None."""
    if not may_be_unserved(path, s3):
        return None
    from ckptgate.app.unserved import looks, seen_unserved  # noqa: PLC0415 - needs an engine

    seen = seen_unserved(path, s3)
    if seen is None:
        return None
    place, first = seen
    with looks(place) as look:
        return _wait_until(
            path,
            _decided(first),
            lambda: _decided(look()),
            pause_s=_STORE_PAUSE_S,
            timeout_s=timeout_s,
        )


def _decided(found: Overview) -> dict[str, Any]:
    """What of it is undecided, and what was decided last in each run.

    Of several attempts at one checkpoint the newest counts: an older one may never be decided.
    """
    newest: dict[tuple[str, str], int] = {}
    for row in found.attempts:
        name, number = split_attempt_id(row.attempt)
        newest[row.run, name] = max(newest.get((row.run, name), 0), number)
    undecided: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    for row in found.attempts:
        name, number = split_attempt_id(row.attempt)
        if row.state not in UNDECIDED:
            last[row.run] = asdict(row)
        elif number == newest[row.run, name]:
            undecided.append(asdict(row))
    return {"undecided": undecided, "last": list(last.values())}


def _wait_until(
    path: str,
    found: dict[str, Any],
    look: Callable[[], dict[str, Any]],
    *,
    pause_s: float,
    timeout_s: float | None,
) -> dict[str, Any]:
    """What *look* finds once nothing is undecided; raises as `_wait_for_run`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while found["undecided"]:
        left_s = pause_s if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            lines = "".join(f"\n  {told(row)}" for row in found["undecided"])
            msg = f"{path}: not decided after {timeout_s:g} s:{lines}"
            raise PendingError(msg, subject=path, hint=f"ckptgate status {path}")
        time.sleep(min(pause_s, left_s))
        found = look()
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
