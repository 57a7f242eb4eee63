"""`serve`: a daemon for `ckpt://` without a mount."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ckptgate.app.commands.options import add_s3_options
from ckptgate.app.daemons import Wanted, daemon_config
from ckptgate.app.headless import Headless
from ckptgate.app.logs import configure_logging
from ckptgate.errors import CkptError, ExitCode
from ckptgate_adapters.channels import error_reply

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    serve = commands.add_parser(
        "serve", help="serve a store to ckpt:// on this machine, without a mount"
    )
    serve.add_argument(
        "--store", default="", metavar="STORE", help="directory or s3://BUCKET/PREFIX"
    )
    serve.add_argument("--spool", default="", metavar="DIR", help="local staging directory")
    add_s3_options(serve)
    serve.add_argument("--config", default="", metavar="FILE", help="TOML, see README")
    serve.add_argument(
        "--idle-exit", type=float, default=0.0, metavar="S", help="end when nobody needs it so long"
    )
    serve.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    serve.set_defaults(handler=_serve)


def _serve(args: argparse.Namespace) -> int:
    wanted = Wanted(
        store=args.store,
        spool=args.spool,
        config=args.config,
        endpoint_url=args.endpoint_url,
        profile=args.profile,
        region=args.region,
    )
    try:
        config = daemon_config(wanted)
        configure_logging(config.log_level, process="supervisor", form=config.log.format)
        is_all_stored = Headless(config, idle_exit_s=args.idle_exit).serve(args.ready_fd)
    except CkptError as exc:
        _tell_parent(args.ready_fd, exc)
        raise
    return ExitCode.OK if is_all_stored else ExitCode.PENDING


def _tell_parent(ready_fd: int | None, exc: CkptError) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, json.dumps({"error": error_reply(exc)}).encode() + b"\n")
    except OSError:
        return  # it was ready once and the parent is gone: the log has the error
