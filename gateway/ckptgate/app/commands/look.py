"""`status`, `ls`, `show`, `log`, `verify`: read, change nothing."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any, Final

import msgspec

from ckptgate.app.addresses import split_address
from ckptgate.app.asking import ask
from ckptgate.app.commands.checkpoint import committed, locate, log_of, record_at
from ckptgate.app.commands.options import add_store_options, store_options
from ckptgate.app.commands.output import add_json, human_bytes, print_json, print_rows
from ckptgate.app.commands.watch import watch_status
from ckptgate.app.locate import (
    Place,
    Served,
    locate_checkpoint,
    locate_run,
    locate_unserved,
    serving,
)
from ckptgate.app.registry import list_mounts
from ckptgate.app.sections import S3Section
from ckptgate.app.unserved import overview_of
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.verify import verify_checkpoint
from ckptgate.errors import CkptError, ErrorKind, ExitCode, MissingError, UsageError
from ckptgate.model.documents import encode
from ckptgate.ports.store import Store

__all__ = ["add_commands"]

_DECIDED: Final = ("committed", "replaced", "aborted")
_LINES_SHOWN: Final = 12


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    status = commands.add_parser("status", help="what is under way, what is missing, who owes it")
    status.add_argument("path", nargs="?", default="", metavar="PATH", help="in a mount or a store")
    status.add_argument("--watch", action="store_true", help="live view")
    add_store_options(status)
    add_json(status)
    status.set_defaults(handler=_status)
    ls = commands.add_parser("ls", help="the committed checkpoints of a run")
    ls.add_argument("run", metavar="RUN", help="the run's directory, in a mount or a store")
    add_store_options(ls)
    add_json(ls)
    ls.set_defaults(handler=_ls)
    show = commands.add_parser("show", help="what a committed checkpoint consists of")
    show.add_argument("path", metavar="PATH", help="the checkpoint, such as mnt/run1/step-100")
    add_store_options(show)
    add_json(show)
    show.set_defaults(handler=_show)
    log = commands.add_parser("log", help="a run's decisions: who, when, why")
    log.add_argument("run", metavar="RUN", help="the run's directory, in a mount or a store")
    add_store_options(log)
    add_json(log)
    log.set_defaults(handler=_log)
    verify = commands.add_parser("verify", help="read every byte and compare with the manifest")
    verify.add_argument("path", metavar="PATH", help="the checkpoint, such as mnt/run1/step-100")
    add_store_options(verify)
    add_json(verify)
    verify.set_defaults(handler=_verify)


def _status(args: argparse.Namespace) -> int:
    report = _unserved(args.path, store_options(args)) if args.path else None
    if report is not None:
        return _status_unserved(args, report)
    served = serving(args.path) if args.path else [Served(mount=m, below="") for m in list_mounts()]
    if args.watch and (args.json or not sys.stdout.isatty()):
        msg = "--watch needs a terminal and goes without --json"
        raise UsageError(msg, hint="ckptgate status --json")
    if args.watch:
        for it in served:
            _report(it)
        return watch_status([it.mount for it in served])
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
    place = locate_unserved(path, s3)
    nothing: MissingError | None = None
    if place is not None:
        try:
            return {"store": place.store, **overview_of(place).to_json()}
        except MissingError as exc:
            nothing = exc
    if locate_unserved(split_address(path)[0], s3) is not None:
        one = locate_checkpoint(path, s3)
        found = overview_of(one).to_json()
        rows = [row for row in found["attempts"] if row["name"] == one.name]
        if rows:
            return {"store": one.store, **found, "attempts": rows}
    if nothing is not None:
        raise nothing
    return None


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
        print(f"    {line}")
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
        return {"mountpoint": mount.mountpoint, "store": mount.store, "error": exc.message}
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
    """3: the last decision of a run was an abort; else 2: something is under way; 6: no answer."""
    if "error" in report:
        return ExitCode.UNUSABLE
    last = {row["run"]: row["state"] for row in report["attempts"] if row["state"] in _DECIDED}
    if "aborted" in last.values():
        return ExitCode.REFUSED
    is_under_way = any(row["state"] in {"open", "sealed"} for row in report["attempts"])
    return ExitCode.PENDING if is_under_way else ExitCode.OK


def _print_report(report: dict[str, Any]) -> None:
    print(f"{report['mountpoint']}  store {report['store']}")
    if "error" in report:
        print(f"  {report['error']}")
        return
    room = report["room"]
    if room["limit"]:
        used, limit, gone = (human_bytes(room[key]) for key in ("used", "limit", "evicted"))
        full = ": full, new files are refused" if room["is_full"] else ""
        print(f"  spool  {used} of {limit}, {gone} given up for room so far{full}")
    for row in report["attempts"]:
        files = row["files"]
        done, total = files["stored"], sum(files.values())
        size = human_bytes(row["size_bytes"])
        where = os.path.join(str(row["run"]), str(row["name"]))
        print(f"  {where}  {row['state']}  {done}/{total} files in the store, {size}")
        _print_lines(row)
    for event in report["events"]:
        print(f"  {event['at']} {event['kind']}: {event['subject']}: {event['detail']}")


def _ls(args: argparse.Namespace) -> int:
    place = locate_run(args.run, store_options(args))
    with place.opened() as store:
        rows = _checkpoints(store, place)
    if args.json:
        print_json({"run": place.run, "checkpoints": rows})
        return ExitCode.OK
    print_rows(
        ("NAME", "COMMITTED", "FILES", "SIZE", "POINTERS", "KEPT"),
        [
            (r["name"], r["committed_at"], r["files"], human_bytes(r["bytes"]),
             ",".join(r["pointers"]), "pinned" if r["is_pinned"] else "")
            for r in rows
        ],
    )  # fmt: skip
    return ExitCode.OK


def _checkpoints(store: Store, place: Place) -> list[dict[str, Any]]:
    """The committed checkpoints of a run, oldest first."""
    state = log_of(store, place).state
    rows: list[dict[str, Any]] = []
    for name, attempt in state.current.items():
        view = state.attempts[attempt]
        manifest = load_manifest(store, place.run, attempt, view.manifest)
        rows.append({
            "name": name,
            "attempt": attempt,
            "committed_at": record_at(store, place, view.decision_index)["at"],
            "files": sum(entry.type == "file" for entry in manifest.entries),
            "bytes": sum(entry.size for entry in manifest.entries),
            "generation": view.generation,
            "is_published": view.is_published,
            "pointers": [key for key, it in state.pointers.items() if it.value.target == name],
            "is_pinned": name in state.pins,
            "quarantined": state.quarantined.get(name, ""),
        })  # fmt: skip
    rows.sort(key=lambda row: row["committed_at"])
    return rows


def _show(args: argparse.Namespace) -> int:
    place = locate(args)
    with place.opened() as store:
        manifest, at = committed(args, store, place)
    if args.json:
        print_json(msgspec.json.decode(encode(manifest)))
        return ExitCode.OK
    print(f"{manifest.name}  attempt {manifest.attempt}  committed {at}")
    print(f"sealed by {manifest.event}  format {manifest.format_name or 'unknown'}")
    print(f"members {', '.join(manifest.members)}  generation {manifest.generation}")
    print_rows(
        ("PATH", "SIZE", "RANK", "BLAKE3"),
        [
            (e.path + ("/" if e.type == "dir" else ""), e.size,
             e.evidence.rank if e.evidence.rank >= 0 else "-", e.digest or e.target)
            for e in manifest.entries
        ],
    )  # fmt: skip
    return ExitCode.OK


def _log(args: argparse.Namespace) -> int:
    place = locate_run(args.run, store_options(args))
    with place.opened() as store:
        length = log_of(store, place).state.length
        records = [record_at(store, place, index) for index in range(length)]
    if args.json:
        print_json({"run": place.run, "records": records})
        return ExitCode.OK
    for record in records:
        entry = dict(record["entry"])
        kind = entry.pop("type")
        words = " ".join(f"{key}={value}" for key, value in entry.items() if value not in ("", []))
        print(f"{record['index']:>6}  {record['at']}  {record['member']}  {kind}  {words}")
    return ExitCode.OK


def _verify(args: argparse.Namespace) -> int:
    place = locate(args)
    with place.opened() as store:
        manifest, _ = committed(args, store, place)
        report = verify_checkpoint(store, place.run, manifest.name)
    if args.json:
        print_json(dataclasses.asdict(report))
    elif not report.problems:
        size = human_bytes(report.size_bytes)
        print(f"{report.name}: {report.files} files, {size}: every byte is as committed")
    else:
        for problem in report.problems:
            print(f"{report.name}: {problem}")
    return ExitCode.INTEGRITY if report.problems else ExitCode.OK
