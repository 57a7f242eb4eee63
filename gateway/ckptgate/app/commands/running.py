"""`exec`, `demo`: run something."""

from __future__ import annotations

import argparse
import os
import uuid
from typing import Any

from ckptgate.errors import MissingError, UnusableError, UsageError

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    run = commands.add_parser(
        "exec", help="run a command as one incarnation of a job: exec [--run-id ID] -- CMD ..."
    )
    run.add_argument(
        "--run-id",
        default=None,
        metavar="ID",
        help="the same on all nodes of the job; default: new",
    )
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    run.set_defaults(handler=_exec)
    demo = commands.add_parser("demo", help="show it working: two nodes, four ranks, a killed rank")
    demo.add_argument("--plain", action="store_true", help="lines instead of a live view")
    demo.set_defaults(handler=_demo)


def _exec(args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        msg = "exec needs a command"
        raise UsageError(msg, hint="ckptgate exec -- torchrun train.py")
    if args.run_id == "":
        msg = "--run-id is empty: processes with different IDs don't see each other's files"
        raise UsageError(msg, hint="ckptgate exec --run-id nightly-7 -- torchrun train.py")
    run_id = args.run_id or os.environ.get("CKPTGATE_RUN_ID") or uuid.uuid4().hex
    os.environ["CKPTGATE_RUN_ID"] = run_id
    try:
        os.execvp(words[0], words)  # noqa: S606 - to become the command is what exec is for
    except FileNotFoundError as exc:
        msg = f"command not found: {words[0]!r}"
        raise MissingError(msg, subject=words[0]) from exc
    except OSError as exc:
        msg = f"cannot run {words[0]!r}: {exc.strerror}"
        raise UnusableError(msg, subject=words[0]) from exc


def _demo(args: argparse.Namespace) -> int:
    from ckptgate.app.demo.play import play  # noqa: PLC0415 - only the demo needs it

    return play(is_plain=args.plain)
