"""`export`, `uploads`: what people need of a store without a mount."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import UTC
from typing import Any

from ckptgate.app.addresses import is_url, store_address
from ckptgate.app.commands.checkpoint import committed, locate
from ckptgate.app.commands.options import add_store_options, store_options
from ckptgate.app.commands.output import add_json, human_bytes, print_json, print_rows
from ckptgate.app.locate import Place, locate_address
from ckptgate.app.stores import opened_target
from ckptgate.app.units import parse_seconds
from ckptgate.engine.export import export_directory
from ckptgate.engine.export_objects import export_objects
from ckptgate.errors import ExitCode, UsageError
from ckptgate.model.documents import Manifest
from ckptgate.ports.export import Exported
from ckptgate.ports.store import Store
from ckptgate.ports.uploads import UnfinishedUpload, Uploads

__all__ = ["add_commands"]

_ABORTED_AFTER: str = "24h"
"""An upload that somebody may be at is never aborted by a command that says no age."""


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    export = commands.add_parser("export", help="a committed checkpoint as plain files, verified")
    export.add_argument("path", metavar="CHECKPOINT", help="in a mount or a store")
    export.add_argument("destination", metavar="DEST", help="a directory or s3://BUCKET/PREFIX")
    export.add_argument("--overwrite", action="store_true", help="replace what DEST holds")
    add_store_options(export)
    add_json(export)
    export.set_defaults(handler=_export)
    uploads = commands.add_parser("uploads", help="unfinished multipart uploads in a bucket")
    uploads.add_argument("what", choices=("list", "abort"))
    uploads.add_argument("path", metavar="STORE_OR_RUN", help="s3://BUCKET/PREFIX, or in a mount")
    uploads.add_argument(
        "--older-than",
        default=None,
        metavar="DURATION",
        help=f"only those; of `abort` the default is {_ABORTED_AFTER}",
    )
    add_store_options(uploads)
    add_json(uploads)
    uploads.set_defaults(handler=_uploads)


def _export(args: argparse.Namespace) -> int:
    destination = store_address(args.destination)
    place = locate(args)
    with place.opened() as store:
        manifest, _ = committed(args, store, place)
        report = _exported(args, place, store, manifest, destination)
    if args.json:
        print_json({"destination": destination, **asdict(report)})
        return ExitCode.OK
    size = human_bytes(report.size_bytes)
    before = f", {report.kept} of them from an earlier try" if report.kept else ""
    print(f"{destination}: {report.files} files, {size}, every byte is as committed{before}")
    return ExitCode.OK


def _exported(
    args: argparse.Namespace, place: Place, store: Store, manifest: Manifest, destination: str
) -> Exported:
    may_replace = bool(args.overwrite)
    if not is_url(destination):
        return export_directory(store, place.run, manifest, destination, may_replace=may_replace)
    # One service for both, where both are buckets.
    with opened_target(destination, place.s3) as target:
        return export_objects(store, place.run, manifest, target, may_replace=may_replace)


def _uploads(args: argparse.Namespace) -> int:
    wanted = args.older_than or (_ABORTED_AFTER if args.what == "abort" else "0s")
    try:
        older_than_s = parse_seconds(wanted)
    except ValueError as exc:
        raise UsageError(str(exc), subject=wanted, hint="--older-than 24h") from exc
    place = locate_address(args.path, store_options(args))
    with place.opened() as store:
        if not isinstance(store, Uploads):
            msg = f"{args.path} is in no bucket: only these have uploads"
            raise UsageError(msg, subject=args.path, hint="name s3://BUCKET/PREFIX")
        found = store.uploads(older_than_s=older_than_s)
        for upload in found if args.what == "abort" else ():
            store.abort_upload(upload)
    _print_uploads(args, place.store, found)
    return ExitCode.OK


def _print_uploads(args: argparse.Namespace, address: str, found: list[UnfinishedUpload]) -> None:
    if args.json:
        rows = [{**asdict(it), "started_at": it.started_at.isoformat()} for it in found]
        print_json({"store": address, "is_aborted": args.what == "abort", "uploads": rows})
        return
    if found:
        print_rows(
            ("STARTED", "PARTS", "BYTES", "OBJECT"),
            [
                (f"{it.started_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}", it.parts,
                 human_bytes(it.size), it.path)
                for it in found
            ],
        )  # fmt: skip
    word = "aborted" if args.what == "abort" else "unfinished"
    size = human_bytes(sum(it.size for it in found))
    print(f"{address}: {len(found)} uploads {word}, {size}")
