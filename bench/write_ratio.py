"""Sequential writes and reads through the mount against the spool's own file system.

`python -m bench.write_ratio [--dir DIR] [--mib N] [--pairs N]`. Each pair writes and reads the same
file natively and through a mount whose spool lies beside it, in alternating order; the medians of
the pairwise ratios (mount / native, 1.0 is native speed) are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptgate.app.registry import find_mount

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of call."""

    name: str
    call_bytes: int
    mib: int


def write(path: Path, case: Case) -> float:
    """Seconds to create and write a file, without fsync; freeing an older one isn't counted."""
    path.unlink(missing_ok=True)
    block = os.urandom(case.call_bytes)
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    for _ in range(case.mib * MIB // case.call_bytes):
        os.write(fd, block)
    os.close(fd)
    return time.perf_counter() - began


def read(path: Path, case: Case) -> float:
    """Seconds to read it."""
    buffer = bytearray(case.call_bytes)
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    while os.readv(fd, [buffer]):
        pass
    os.close(fd)
    return time.perf_counter() - began


def paired(native: Callable[[], float], mounted: Callable[[], float], pairs: int) -> list[float]:
    """Ratios native seconds / mount seconds of alternating pairs; the first pair is a warm-up."""
    ratios: list[float] = []
    for number in range(pairs + 1):
        if number % 2:
            through, plain = mounted(), native()
        else:
            plain, through = native(), mounted()
        if number:
            ratios.append(plain / through)
    return ratios


def daemon_cpu_s(mountpoint: Path) -> float:
    """CPU seconds of the mount process so far."""
    info = find_mount(str(mountpoint))
    assert info is not None
    children = Path(f"/proc/{info.pid}/task/{info.pid}/children").read_text().split()
    for child in children:
        if b"mount" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise RuntimeError("no mount process")


def run(base: Path, mib: int, pairs: int) -> None:
    store, mnt, spool = base / "store", base / "mnt", base / "spool"
    store.mkdir()
    command = [sys.executable, "-m", "ckptgate.app.cli"]
    subprocess.run([*command, "mount", store, mnt, "--spool", spool], check=True)
    try:
        (mnt / "step-1").mkdir()
        cases = [
            Case("1 MiB", MIB, mib),
            Case("64 KiB", 64 << 10, mib),
            Case("4 KiB", 4 << 10, mib // 4),
        ]
        print(f"{'calls':>8} {'write':>7} {'read':>7}   (median mount/native of {pairs} pairs)")
        before, written = daemon_cpu_s(mnt), 0
        for case in cases:
            plain, through = spool / "native.bin", mnt / "step-1/through.bin"
            writes = paired(lambda: write(plain, case), lambda: write(through, case), pairs)  # noqa: B023
            reads = paired(lambda: read(plain, case), lambda: read(through, case), pairs)  # noqa: B023
            written += (pairs + 1) * case.mib
            print(
                f"{case.name:>8} {statistics.median(writes):7.2f} {statistics.median(reads):7.2f}"
            )
            plain.unlink()
            through.unlink()
        used = daemon_cpu_s(mnt) - before
        print(f"CPU of the mount process: {used / (written / 1024):.3f} s per GiB written")
    finally:
        subprocess.run([*command, "umount", mnt, "--timeout", "1", "--lazy"], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="file system to measure on")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as base:
        run(Path(base), args.mib, args.pairs)


if __name__ == "__main__":
    main()
