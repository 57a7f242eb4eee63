"""`python -m tests.frameworks [FRAMEWORK ...]`: runs the matrix, prints the table of the README.

Both places: a raw directory, and ckptgate's mounts. With `--results FILE` what was found is kept
there, so that frameworks can be run one after the other; `--table` prints from that alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.frameworks import table
from tests.frameworks.matrix import FAULTS, Result, matrix
from tests.frameworks.trainings.known import TITLES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks", description=__doc__)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(TITLES))
    parser.add_argument("--results", type=Path, help="JSON lines that results are added to")
    parser.add_argument("--table", action="store_true", help="only print it")
    parser.add_argument("--faults", default=",".join(FAULTS), help="of those, by commas")
    parser.add_argument("--places", default="raw,ckptgate")
    words = parser.parse_args()
    # Mounts must not outlive a run that is ended early.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    results: list[Result] = []
    if words.results and words.results.exists():
        lines = words.results.read_text().splitlines()
        results = [Result(**json.loads(line)) for line in lines]
    if not words.table:
        places, faults = words.places.split(","), words.faults.split(",")
        for name in words.frameworks or TITLES:
            for result in run(name, places, faults):
                results.append(result)
                if words.results:
                    with words.results.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    print(table.markdown(results))
    return 0


def run(name: str, places: Iterable[str], faults: Iterable[str]) -> Iterable[Result]:
    """All cases of a framework; one that couldn't be run at all is told and left out."""
    with (
        tempfile.TemporaryDirectory(prefix="frameworks-") as base,
        matrix(name, Path(base), mounted="ckptgate" in places) as made,
    ):
        for place in places:
            for fault in dict.fromkeys(("none", *faults)):
                try:
                    found = made.case(place, fault)
                except AssertionError:
                    traceback.print_exc()
                    continue
                print(found, file=sys.stderr, flush=True)
                yield found


if __name__ == "__main__":
    sys.exit(main())
