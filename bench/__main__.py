"""`python -m bench [SUBJECT ...] [--quick] [--strict] [--json]`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench import machine, report
from bench.plan import FULL, QUICK, TINY, Plan, places

__all__ = ["SUBJECTS", "main"]

SUBJECTS = (
    "write",
    "read",
    "fallback",
    "metadata",
    "listing",
    "latency",
    "commit_large",
    "commit_many",
    "gating",
    "requests",
    "memory",
    "idle",
    "seeing",
    "drain",
    "restart",
    "fsspec",
    "s3_upload",
    "s3_restore",
    "s3_requests",
)


def main(argv: list[str] | None = None) -> int:
    """Measure the named subjects (all, if none is named); 1 if `--strict` and a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, three pairs")
    parser.add_argument("--tiny", action="store_true", help="whether it runs at all; no figures")
    parser.add_argument("--pairs", type=int, help="pairs of each comparison")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--disk", type=Path, help="a directory on a disk")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a limit is not met")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.subjects) - set(SUBJECTS))
    if unknown:
        parser.error(f"no subject {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    sizes = TINY if args.tiny else QUICK if args.quick else FULL
    if args.pairs:
        sizes = replace(sizes, pairs=args.pairs)
    plan = Plan(sizes, places(args.tmpfs, args.disk))
    # Mounts and gigabytes must not outlive a run that is ended early.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    about = machine.describe()
    if not args.json:
        print(f"{about}\n{report.header()}", flush=True)
    figures: list[report.Figure] = []
    began = time.monotonic()
    for subject in args.subjects or SUBJECTS:
        for figure in importlib.import_module(f"bench.{subject}").run(plan):
            figures.append(figure)
            if not args.json:
                print(report.line(figure), flush=True)
    missed = sum(figure.is_met is False for figure in figures)
    if args.json:
        print(report.as_json(figures, machine=about))
    else:
        limits = sum(figure.is_met is not None for figure in figures)
        took = time.monotonic() - began
        print(f"{limits - missed} of {limits} limits met, in {took:.0f} s")
    return 1 if args.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
