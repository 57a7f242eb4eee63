"""`status`: what is under way, what is missing, who owes it; as text, live, or as JSON.

It owns the exit code: 0 clean, 2 pending, 3 refused or in doubt, 6 a daemon didn't answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from ckptgate.app.asking import ask
from ckptgate.app.commands.options import add_store_options, store_options
from ckptgate.app.commands.output import (
    add_json,
    finishing_words,
    human_bytes,
    human_seconds,
    print_json,
    printable,
)
from ckptgate.app.locate import Served, may_be_unserved, serving
from ckptgate.app.registry import list_mounts
from ckptgate.app.sections import S3Section
from ckptgate.errors import CkptError, ErrorKind, ExitCode, UsageError
from ckptgate.model.states import is_loss

__all__ = ["add_commands"]

_KEPT: Final = ("committed", "replaced")
_LINES_SHOWN: Final = 12
_RANKS_SHOWN: Final = 16


def add_commands(commands: Any) -> None:
    """Add this module's command."""
    status = commands.add_parser("status", help="what is under way, what is missing, who owes it")
    status.add_argument("path", nargs="?", default="", metavar="PATH", help="in a mount or a store")
    status.add_argument("-w", "--watch", action="store_true", help="live view, on a terminal")
    add_store_options(status)
    add_json(status)
    status.set_defaults(handler=_status)


def _status(args: argparse.Namespace) -> int:
    report = _unserved(args.path, store_options(args)) if args.path else None
    if report is not None:
        return _status_unserved(args, report)
    served = serving(args.path) if args.path else [Served(mount=m, below="") for m in list_mounts()]
    if args.watch and args.json:
        msg = "--watch goes without --json"
        raise UsageError(msg, hint="ckptgate status --json")
    # Where nobody sees it move it is the plain report, once.
    if args.watch and sys.stdout.isatty():
        from ckptgate.app.commands.watch import watch_status  # noqa: PLC0415 - rich takes its time

        for it in served:
            _report(it)
        return watch_status([(it.mount, it.below) for it in served])
    reports = _reports(served)
    if args.json:
        print_json(reports[0] if args.path and len(reports) == 1 else reports)
    elif not reports:
        print("no ckptgate mount runs on this machine for this user")
    for report in () if args.json else reports:
        _print_report(report)
    return max((_status_code(report) for report in reports), default=ExitCode.OK)


def _unserved(path: str, s3: S3Section) -> dict[str, Any] | None:
    """What the store alone says of its runs, a run, or a checkpoint, if no daemon here serves it.

    Raises:
        MissingError: nothing was ever decided there.
        CkptError: the store failed.
    """
    if not may_be_unserved(path, s3):
        return None
    from ckptgate.app.unserved import seen_unserved  # noqa: PLC0415 - only this needs an engine

    seen = seen_unserved(path, s3)
    return None if seen is None else {"store": seen[0].store, **seen[1].to_json()}


def _status_unserved(args: argparse.Namespace, report: dict[str, Any]) -> int:
    if args.watch:
        msg = f"no mount on this machine serves {report['store']}, so there is nothing to watch"
        raise UsageError(msg, subject=args.path, hint=f"ckptgate status {args.path}")
    if args.json:
        print_json(report)
    else:
        _print_unserved(report)
    return _status_code(report)


def _print_unserved(report: dict[str, Any]) -> None:
    print(f"store {report['store']}  (no daemon here serves it: what nodes have staged is unknown)")
    for run in report["runs"]:
        newest = f", newest {run['last_committed']}" if run["last_committed"] else ""
        points = "".join(f", {name} -> {to}" for name, to in run["pointers"].items())
        held = ", held" if run["is_held"] else ""
        print(f"  {run['run'] or '/'}  {run['committed']} committed{newest}{points}{held}")
        for name, why in run["quarantined"].items():
            print(f"    {name} is quarantined: {why}")
    for row in report["attempts"]:
        where = os.path.join(str(row["run"]), str(row["name"]))
        members = f"  members {', '.join(row['members'])}" if row["members"] else ""
        print(f"  {where}  {row['state']}{members}")
        _print_lines(row)


def _print_lines(row: dict[str, Any]) -> None:
    lines = [*([row["reason"]] if row["reason"] else []), *row["missing"]]
    for line in lines[:_LINES_SHOWN]:
        print(f"    {printable(line)}")
    if len(lines) > _LINES_SHOWN:
        print(f"    ... and {len(lines) - _LINES_SHOWN} more (--json has them)")


def _reports(served: list[Served]) -> list[dict[str, Any]]:
    """What the daemons say; of several that serve one store one may know what others don't.

    Raises:
        CkptError: nothing of that path is known to any of them.
    """
    reports: list[dict[str, Any]] = []
    missing: CkptError | None = None
    for it in served:
        try:
            reports.append(_of_run(_report(it), it.below))
        except CkptError as exc:
            missing = exc
    if missing is not None and not reports:
        raise missing
    return reports


def _report(served: Served) -> dict[str, Any]:
    """What the mount's daemon says.

    Raises:
        CkptError: it has nothing at that path.
    """
    mount = served.mount
    try:
        found: dict[str, Any] = ask(mount, {"op": "status", "path": served.below})
    except CkptError as exc:
        if exc.kind is ErrorKind.NOT_FOUND:
            raise
        # The others are still worth seeing; the exit code tells.
        return {"mountpoint": mount.place, "store": mount.store, "error": exc.message}
    if "schema" not in found:
        error = "its daemon is of an older release: unmount, and mount again"
        return {"mountpoint": mount.place, "store": mount.store, "error": error}
    return found


def _of_run(report: dict[str, Any], below: str) -> dict[str, Any]:
    """The report, cut down to what lies at, below or around a path that isn't the whole mount."""
    if not below or below.startswith("..") or "error" in report:
        return report
    rows = [row for row in report["attempts"] if _is_about(below, row)]
    return {**report, "attempts": rows}


def _is_about(directory: str, row: dict[str, Any]) -> bool:
    checkpoint = os.path.join(str(row["run"]), str(row["name"])) + "/"
    return checkpoint.startswith(f"{directory}/") or f"{directory}/".startswith(checkpoint)


def _status_code(report: dict[str, Any]) -> ExitCode:
    """The report's part of the exit code; of several mounts the highest counts."""
    if "error" in report:
        return ExitCode.UNUSABLE
    rows = report["attempts"]
    # Rows are in the order in which they began: an old one that was given up late is old news.
    last = {row["run"]: is_lost for row in rows if (is_lost := _is_lost(row)) is not None}
    is_doubtful = any(row.get("is_hidden") for row in rows)
    is_doubtful = is_doubtful or any(run["in_doubt"] for run in report["runs"])
    if is_doubtful or any(last.values()):
        return ExitCode.REFUSED
    is_under_way = any(row["state"] in {"open", "sealed"} for row in rows)
    return ExitCode.PENDING if is_under_way else ExitCode.OK


def _is_lost(row: dict[str, Any]) -> bool | None:
    """Whether a save that ended is lost; None of one that goes on or that its job took away."""
    if row["state"] in _KEPT:
        return False
    return True if is_loss(row["state"], row["reason"]) else None


def _print_report(report: dict[str, Any]) -> None:
    print(f"{report['mountpoint'] or report['spool']}  store {report['store']}")
    if "error" in report:
        print(f"  {printable(report['error'])}")
        return
    for line in _about(report):
        print(f"  {printable(line)}")
    for row in report["attempts"]:
        files = row["files"]
        done, total = files["stored"], sum(files.values())
        size = human_bytes(row["size_bytes"])
        where = printable(os.path.join(str(row["run"]), str(row["name"])))
        print(f"  {where}  {row['state']}  {done}/{total} files in the store, {size}{_pace(row)}")
        for line in _ranks(row):
            print(f"    {line}")
        _print_lines(row)
    for event in report["events"]:
        text = f"{event['at']} {event['kind']}: {event['subject']}: {event['detail']}"
        print(f"  {printable(text)}")
        if event["hint"] and event["severity"] != "notice":
            print(f"    {event['hint']}")


def _about(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the mount as a whole."""
    room, contact = report["room"], report["contact"]
    if words := finishing_words(report):
        yield words
    if room["limit"]:
        used, limit, gone = (human_bytes(room[key]) for key in ("used", "limit", "evicted"))
        full = ": full, new files are refused" if room["is_full"] else ""
        yield f"spool  {used} of {limit}, {gone} given up for room so far{full}"
    if not contact["is_reached"]:
        age_s = contact["age_s"]
        since = "it never did" if age_s is None else f"for {human_seconds(age_s)}"
        yield f"the store does not answer ({since}): {contact['error'] or 'no answer'}"
    if report["page"]:
        yield f"page  {report['page']}"
    for run in report["runs"]:
        if run["in_doubt"]:
            yield f"{run['run'] or '/'}: it is unknown what became of the last record of its log"


def _pace(row: dict[str, Any]) -> str:
    """How fast it goes, where that is known."""
    if not row["rate_bytes_s"] or row["stored_bytes"] >= row["size_bytes"]:
        return ""
    return f", {human_bytes(row['rate_bytes_s'])}/s, {human_seconds(row['eta_s'])} left"


def _ranks(row: dict[str, Any]) -> Iterator[str]:
    """One line for each rank here, where there are several."""
    ranks = row["ranks"]
    if len(ranks) < 2:
        return
    for it in ranks[:_RANKS_SHOWN]:
        staged, digested, stored = (
            human_bytes(it[f"{step}_bytes"]) for step in ("staged", "digested", "stored")
        )
        who = "rank unknown" if it["rank"] < 0 else f"rank {it['rank']}"
        said = "".join(f", {word}" for word in ("committed", "voted") if it[word])
        yield f"{who}: {staged} staged, {digested} digested, {stored} in the store{said}"
    if len(ranks) > _RANKS_SHOWN:
        yield f"... and {len(ranks) - _RANKS_SHOWN} more ranks (--json has them)"
