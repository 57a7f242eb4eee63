"""`gc`, `pin`, `unpin`: what is kept in the store and the spool, and what goes.

A daemon does it where one serves the path here; else what a store alone allows is done.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from ckptgate.app.addresses import split_address
from ckptgate.app.asking import ask
from ckptgate.app.commands.options import add_store_options, store_options
from ckptgate.app.commands.output import add_json, human_bytes, print_json, print_rows
from ckptgate.app.locate import (
    Place,
    locate_checkpoint,
    locate_in_mount,
    locate_served,
    locate_unserved,
)
from ckptgate.app.registry import MountInfo, list_mounts
from ckptgate.app.units import parse_seconds
from ckptgate.errors import ExitCode, MissingError, UsageError

__all__ = ["add_commands"]

_TIMEOUT_S: Final = 24 * 3600.0
"""A first round over a large store takes its time."""
_FOREVER_S: Final = 1e12
"""As a number that JSON has."""


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    gc = commands.add_parser("gc", help="remove what nothing refers to any more")
    gc.add_argument(
        "path", nargs="?", default=None, metavar="PATH", help="a mount or a run in it; default: all"
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    gc.add_argument(
        "--grace",
        default=None,
        metavar="DURATION",
        help="instead of the configured one, such as 1h",
    )
    add_store_options(gc)
    add_json(gc)
    gc.set_defaults(handler=_gc)
    for word, is_on, text in (
        ("pin", True, "keep a committed checkpoint, whoever deletes it"),
        ("unpin", False, "keep it no longer"),
    ):
        pin = commands.add_parser(word, help=text)
        pin.add_argument("path", metavar="PATH", help="such as mnt/run1/step-100")
        pin.add_argument("--reason", default="", metavar="TEXT", help="stands in the run's log")
        add_store_options(pin)
        add_json(pin)
        pin.set_defaults(handler=_pin, is_on=is_on)


def _gc(args: argparse.Namespace) -> int:
    request: dict[str, Any] = {"op": "gc", "dry_run": args.dry_run}
    if args.path == "":
        # A variable that isn't set must not mean everything on the machine.
        msg = "PATH is empty"
        raise UsageError(msg, subject="PATH", hint="name a mount or a run, or leave it out for all")
    if args.grace is not None:
        try:
            request["grace_s"] = min(parse_seconds(args.grace), _FOREVER_S)
        except ValueError as exc:
            raise UsageError(str(exc), subject=args.grace, hint="--grace 24h") from exc
    place = locate_unserved(args.path, store_options(args)) if args.path else None
    if place is not None:
        return _gc_unserved(args, place)
    mounts = list_mounts()
    if args.path:
        served = locate_served(args.path)
        mounts = [served.mount]
        if served.below:
            request["run"] = served.below
    if not mounts:
        msg = "no ckptgate mount runs on this machine for this user"
        raise MissingError(msg, hint="mount the store: its daemon does the work")
    reports = [_ask(mount, request) for mount in mounts]
    if args.json:
        print_json(reports[0] if args.path else reports)
        return ExitCode.OK
    for report in reports:
        _print(report)
    return ExitCode.OK


def _gc_unserved(args: argparse.Namespace, place: Place) -> int:
    if not args.dry_run:
        msg = f"no mount on this machine serves {place.store}"
        hint = "mount it: only a daemon knows how long what is dead was so; --dry-run tells what is"
        raise MissingError(msg, subject=args.path, hint=hint)
    from ckptgate.app.unserved import would_go  # noqa: PLC0415 - only this needs an engine

    found = would_go(place)
    report = {
        "store": place.store,
        "dry_run": True,
        "files": sum(item.count for item in found),
        "bytes": sum(item.size for item in found),
        "removed": [dataclasses.asdict(item) for item in found],
    }
    if args.json:
        print_json(report)
        return ExitCode.OK
    _print({"mountpoint": place.store, **report})
    print("no daemon here serves it: each goes its grace after a daemon first saw it dead")
    return ExitCode.OK


def _ask(mount: MountInfo, request: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = ask(mount, request, timeout_s=_TIMEOUT_S)
    return {"mountpoint": mount.place, **found}


def _print(report: dict[str, Any]) -> None:
    word = "would go" if report["dry_run"] else "went"
    rows = [
        (item["place"], item["run"] or "/", item["what"], item["why"], item["count"],
         human_bytes(item["size"]))
        for item in report["removed"]
    ]  # fmt: skip
    if rows:
        print_rows(("PLACE", "RUN", "WHAT", "WHY", "FILES", "BYTES"), rows)
    size = human_bytes(report["bytes"])
    print(f"{report['mountpoint']}: {report['files']} files {word}, {size}")


def _pin(args: argparse.Namespace) -> int:
    s3 = store_options(args)
    if locate_unserved(split_address(args.path)[0], s3) is not None:
        from ckptgate.app.unserved import pin_in  # noqa: PLC0415 - only this needs an engine

        place = locate_checkpoint(args.path, s3)
        pin_in(place, is_on=args.is_on, reason=args.reason)
        found = {"run": place.run, "name": place.name, "is_pinned": args.is_on}
    else:
        place, mount = locate_in_mount(args.path)
        request = {"op": "pin", "run": place.run, "name": place.name, "is_on": args.is_on}
        found = ask(mount, {**request, "reason": args.reason})
    if args.json:
        print_json(found)
    else:
        print(f"{found['name']}: {'pinned' if found['is_pinned'] else 'not pinned'}")
    return ExitCode.OK
