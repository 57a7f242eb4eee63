"""`ls`, `show`, `log`, `verify`: read, change nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import msgspec

from ckptgate.app.commands.checkpoint import committed, locate, log_of, record_at
from ckptgate.app.commands.options import add_store_options, store_options
from ckptgate.app.commands.output import (
    add_json,
    human_bytes,
    print_json,
    print_rows,
    printable,
)
from ckptgate.app.locate import Place, locate_run
from ckptgate.engine.held import HeldPart, HeldState, held_state
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.verify import verify_checkpoint
from ckptgate.errors import ExitCode
from ckptgate.model.documents import Manifest, encode
from ckptgate.ports.store import Store

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
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
            "saved_by": _saved_by(manifest),
        })  # fmt: skip
    rows.sort(key=lambda row: row["committed_at"])
    return rows


def _show(args: argparse.Namespace) -> int:
    place = locate(args)
    with place.opened() as store:
        manifest, at = committed(args, store, place)
        held = held_state(store, place.run, manifest)
    if args.json:
        print_json({**msgspec.json.decode(encode(manifest)), "holds": _held_json(held)})
        return ExitCode.OK
    print(f"{manifest.name}  attempt {manifest.attempt}  committed {at}")
    print(f"sealed by {manifest.event}  format {manifest.format_name or 'unknown'}")
    print(f"members {', '.join(manifest.members)}  generation {manifest.generation}")
    print(f"holds {_held_text(held)}")
    for line in _saved_by_lines(manifest):
        print(line)
    print_rows(
        ("PATH", "SIZE", "RANK", "BLAKE3"),
        [
            (e.path + ("/" if e.type == "dir" else ""), e.size,
             e.evidence.rank if e.evidence.rank >= 0 else "-", e.digest or e.target)
            for e in manifest.entries
        ],
    )  # fmt: skip
    return ExitCode.OK


def _held_json(held: HeldState) -> dict[str, Any]:
    """The training state as JSON values."""
    parts = {part: dataclasses.asdict(how) for part, how in held.parts.items()}
    rest = {"step": held.step, "world_size": held.world_size, "problem": held.problem}
    return {"parts": parts, **rest}


def _held_text(held: HeldState) -> str:
    """The training state on one line."""
    if held.problem:
        return printable(f"what can't be told: {held.problem}")
    words = [_part_text(part, how, held.world_size) for part, how in held.parts.items()]
    if held.step is not None:
        words.append(f"step {held.step}")
    return ", ".join(words) or "no training state that is known by its names"


def _part_text(part: str, how: HeldPart, world_size: int | None) -> str:
    if how.ranks and world_size is not None:
        # Of a larger world that the job once had files may be left.
        there = sum(rank < world_size for rank in how.ranks)
        return f"{part} (ranks: {there} of {world_size})"
    if how.ranks:
        return f"{part} (ranks: {len(how.ranks)})"
    return f"{part} (files: {len(how.files)})"


def _saved_by(manifest: Manifest) -> dict[str, Any] | None:
    """How it was saved, as JSON values; None where nobody recorded that."""
    return msgspec.to_builtins(manifest.saved_by) if manifest.saved_by else None


def _saved_by_lines(manifest: Manifest) -> list[str]:
    """The same for people: one line a field, and what ranks said differently."""
    saved_by = manifest.saved_by
    if not saved_by:
        return []
    lines = [f"saved by {key}: {_json(value)}" for key, value in sorted(saved_by.record.items())]
    for conflict in saved_by.conflicts:
        said = "; ".join(
            f"{_json(value.value)} (rank {', '.join(map(str, value.ranks))})"
            for value in conflict.values
        )
        lines.append(f"saved by {'.'.join(conflict.field)}, differently: {said}")
    return lines


def _json(value: Any) -> str:
    # What a trainer recorded may hold characters that a terminal would obey.
    return json.dumps(value, sort_keys=True)


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
        print_json({**dataclasses.asdict(report), "saved_by": _saved_by(manifest)})
    elif not report.problems:
        size = human_bytes(report.size_bytes)
        print(f"{report.name}: {report.files} files, {size}: every byte is as committed")
    else:
        for problem in report.problems:
            print(f"{report.name}: {problem}")
    return ExitCode.INTEGRITY if report.problems else ExitCode.OK
