"""`status`, `ls`, `show`, `log`, `verify`: read, change nothing."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import asdict
from typing import Any, Final

import msgspec

from ckptgate.app.asking import ask
from ckptgate.app.commands.output import add_json, human_bytes, print_json, print_rows
from ckptgate.app.commands.watch import watch_status
from ckptgate.app.locate import Place, locate_checkpoint, locate_run, require_mount
from ckptgate.app.registry import MountInfo, list_mounts
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.runlog import RunLog
from ckptgate.engine.verify import verify_checkpoint
from ckptgate.errors import CkptError, ExitCode, MissingError, UsageError
from ckptgate.model.documents import Manifest, encode
from ckptgate.model.layout import log_key
from ckptgate_adapters.posix_store import PosixStore
from ckptgate_adapters.system_clock import SystemClock, SystemIds

__all__ = ["add_commands"]

_DECIDED: Final = ("committed", "replaced", "aborted")
_LINES_SHOWN: Final = 12


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    status = commands.add_parser("status", help="what is under way, what is missing, who owes it")
    status.add_argument("path", nargs="?", default="", metavar="PATH", help="a path in a mount")
    status.add_argument("--watch", action="store_true", help="live view")
    add_json(status)
    status.set_defaults(handler=_status)
    ls = commands.add_parser("ls", help="the committed checkpoints of a run")
    ls.add_argument("run", metavar="RUN", help="the run's directory, in a mount or a store")
    add_json(ls)
    ls.set_defaults(handler=_ls)
    show = commands.add_parser("show", help="what a committed checkpoint consists of")
    show.add_argument("path", metavar="PATH", help="the checkpoint, such as mnt/run1/step-100")
    add_json(show)
    show.set_defaults(handler=_show)
    log = commands.add_parser("log", help="a run's decisions: who, when, why")
    log.add_argument("run", metavar="RUN", help="the run's directory, in a mount or a store")
    add_json(log)
    log.set_defaults(handler=_log)
    verify = commands.add_parser("verify", help="read every byte and compare with the manifest")
    verify.add_argument("path", metavar="PATH", help="the checkpoint, such as mnt/run1/step-100")
    add_json(verify)
    verify.set_defaults(handler=_verify)


def _mounts(path: str) -> list[MountInfo]:
    return [require_mount(path)] if path else list_mounts()


def _status(args: argparse.Namespace) -> int:
    mounts = _mounts(args.path)
    if args.watch and (args.json or not sys.stdout.isatty()):
        msg = "--watch needs a terminal and goes without --json"
        raise UsageError(msg, hint="ckptgate status --json")
    if args.watch:
        return watch_status(mounts)
    reports = [_of_run(_report(mount), mount, args.path) for mount in mounts]
    if args.json:
        print_json(reports[0] if args.path else reports)
    elif not reports:
        print("no ckptgate mount runs on this machine for this user")
    for report in () if args.json else reports:
        _print_report(report)
    return max((_status_code(report) for report in reports), default=ExitCode.OK)


def _report(mount: MountInfo) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ask(mount, {"op": "status"})
    except CkptError as exc:
        # The others are still worth seeing; the exit code tells.
        return {"mountpoint": mount.mountpoint, "store": mount.store, "error": exc.message}
    return found


def _of_run(report: dict[str, Any], mount: MountInfo, path: str) -> dict[str, Any]:
    """The report, cut down to what lies below *path* where that isn't the whole mount."""
    below = os.path.relpath(os.path.realpath(path), mount.mountpoint) if path else "."
    if below == "." or below.startswith("..") or "error" in report:
        return report
    rows = [row for row in report["attempts"] if _is_below(below, row)]
    return {**report, "attempts": rows}


def _is_below(directory: str, row: dict[str, Any]) -> bool:
    return (os.path.join(str(row["run"]), str(row["name"])) + "/").startswith(directory + "/")


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
        lines = [*([row["reason"]] if row["reason"] else []), *row["missing"]]
        for line in lines[:_LINES_SHOWN]:
            print(f"    {line}")
        if len(lines) > _LINES_SHOWN:
            print(f"    ... and {len(lines) - _LINES_SHOWN} more (--json has them)")
    for event in report["events"]:
        print(f"  {event['at']} {event['kind']}: {event['subject']}: {event['detail']}")


def _open_log(place: Place) -> tuple[PosixStore, RunLog]:
    store = PosixStore(place.store)
    log = RunLog(store, place.run, clock=SystemClock(), ids=SystemIds(), member="")
    if not log.refresh().length:
        msg = f"{place.run or '/'!r} is not a run: nothing was ever decided in it"
        raise MissingError(msg, subject=place.run, hint="name the directory of the checkpoints")
    return store, log


def _record(store: PosixStore, place: Place, index: int) -> dict[str, Any]:
    data = store.get(log_key(place.run, index))
    record: dict[str, Any] = msgspec.json.decode(data)
    return record


def _ls(args: argparse.Namespace) -> int:
    place = locate_run(args.run)
    store, log = _open_log(place)
    state = log.state
    rows: list[dict[str, Any]] = []
    for name, attempt in state.current.items():
        view = state.attempts[attempt]
        manifest = load_manifest(store, place.run, attempt, view.manifest)
        rows.append({
            "name": name,
            "attempt": attempt,
            "committed_at": _record(store, place, view.decision_index)["at"],
            "files": sum(entry.type == "file" for entry in manifest.entries),
            "bytes": sum(entry.size for entry in manifest.entries),
            "generation": view.generation,
            "is_published": view.is_published,
            "pointers": [key for key, it in state.pointers.items() if it.value.target == name],
            "is_pinned": name in state.pins,
            "quarantined": state.quarantined.get(name, ""),
        })  # fmt: skip
    rows.sort(key=lambda row: row["committed_at"])
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


def _locate(path: str) -> Place:
    """The checkpoint that *path* names; a run in its place is called one."""
    try:
        place = locate_checkpoint(path)
    except MissingError:
        with contextlib.suppress(MissingError):
            run = locate_run(path)
            _refuse_run(path, run.store, run.run)
        raise
    _refuse_run(path, place.store, os.path.join(place.run, place.name))
    return place


def _refuse_run(path: str, store: str, run: str) -> None:
    log = RunLog(PosixStore(store), run, clock=SystemClock(), ids=SystemIds(), member="")
    if log.refresh().length:
        msg = f"{path} is a run: name a checkpoint in it"
        raise UsageError(msg, subject=path, hint=f"ckptgate ls {path}")


def _committed(args: argparse.Namespace) -> tuple[Place, PosixStore, Manifest, str]:
    """Place, store, manifest, and when it was committed."""
    place = _locate(args.path)
    store, log = _open_log(place)
    attempt = log.state.current.get(place.name)
    if attempt is None:
        msg = f"no committed checkpoint {place.name!r} in the run {place.run or '/'!r}"
        raise MissingError(msg, subject=args.path, hint=f"ckptgate ls {os.path.dirname(args.path)}")
    view = log.state.attempts[attempt]
    manifest = load_manifest(store, place.run, attempt, view.manifest)
    return place, store, manifest, str(_record(store, place, view.decision_index)["at"])


def _show(args: argparse.Namespace) -> int:
    _, _, manifest, at = _committed(args)
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
    place = locate_run(args.run)
    store, log = _open_log(place)
    records = [_record(store, place, index) for index in range(log.state.length)]
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
    place, store, manifest, _ = _committed(args)
    report = verify_checkpoint(store, place.run, manifest.name)
    if args.json:
        print_json(asdict(report))
    elif not report.problems:
        size = human_bytes(report.size_bytes)
        print(f"{report.name}: {report.files} files, {size}: every byte is as committed")
    else:
        for problem in report.problems:
            print(f"{report.name}: {problem}")
    return ExitCode.INTEGRITY if report.problems else ExitCode.OK
