"""`ckpt://` beside local files: fsspec's file objects, put_file, and a save by DCP.

The publisher stands still meanwhile, as its digests would compete for the processors with either
side. What is read back is what is in the spool; the local side reads that very file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec

from bench import mounts
from bench.pairs import alternate, ratios
from bench.plan import MIB, Plan
from bench.report import Figure, spread
from ckptgate.app.registry import list_mounts

__all__ = ["run"]


def run(plan: Plan) -> Iterator[Figure]:
    """Ratios of speed, and of a save's duration."""
    for place in plan.places:
        with mounts.scratch(place.path) as base, _served(base) as fs:
            yield from _written(plan, place.name, fs, base)
            yield from _read(plan, place.name, fs)
            yield from _put(plan, place.name, fs, base)
            if find_spec("torch") is not None:
                yield from _saved(plan, place.name, fs, base)


@contextlib.contextmanager
def _served(base: Path) -> Iterator[Any]:
    """The file system of a store below *base*; its daemon ends with it."""
    (base / "store").mkdir()
    fs = fsspec.filesystem("ckpt", store=str(base / "store"), spool=str(base / "spool"))
    fs.mkdir("run")
    spool = os.path.realpath(base / "spool")
    (info,) = [info for info in list_mounts() if info.spool == spool]
    publisher = _child(info.pid, b"publisher")
    os.kill(publisher, signal.SIGSTOP)
    try:
        yield fs
    finally:
        fs.client.close()
        os.kill(publisher, signal.SIGKILL)
        os.kill(info.pid, signal.SIGKILL)
        while info.is_alive or Path(f"/proc/{publisher}").exists():
            time.sleep(0.02)
        time.sleep(0.5)


def _child(pid: int, kind: bytes) -> int:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if kind in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(kind)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _written(plan: Plan, place: str, fs: Any, base: Path) -> Iterator[Figure]:
    block = os.urandom(MIB)
    count = plan.sizes.stream // MIB

    def write(open_: Callable[[str, str], Any], path: str, remove: Callable[[str], Any]) -> float:
        def work() -> None:
            with open_(path, "wb") as file:
                for _ in range(count):
                    file.write(block)

        took = _timed(work)
        remove(path)
        os.sync()
        return took

    plain, passed = alternate(
        [
            lambda: write(open, str(base / "local.bin"), os.unlink),
            lambda: write(fs.open, "run/step-1/a.bin", fs.rm_file),
        ],
        plan.sizes.pairs,
    )
    yield spread("fsspec", f"{place}: write, 1 MiB", ratios(plain, passed), "x", at_least=0.9)


def _read(plan: Plan, place: str, fs: Any) -> Iterator[Figure]:
    with fs.open("run/step-1/read.bin", "wb") as file:
        for _ in range(plan.sizes.stream // MIB):
            file.write(os.urandom(MIB))
        native = os.readlink(f"/proc/self/fd/{file.fileno()}")

    def read(open_: Callable[[str, str], Any], path: str) -> float:
        def work() -> None:
            with open_(path, "rb") as file:
                while file.read(MIB):
                    pass

        return _timed(work)

    sides = [lambda: read(open, native), lambda: read(fs.open, "run/step-1/read.bin")]
    plain, passed = alternate(sides, plan.sizes.pairs)
    yield spread("fsspec", f"{place}: read, warm", ratios(plain, passed), "x", at_least=0.9)
    fs.rm_file("run/step-1/read.bin")


def _put(plan: Plan, place: str, fs: Any, base: Path) -> Iterator[Figure]:
    source = base / "source.bin"
    with source.open("wb") as file:
        for _ in range(plan.sizes.stream // MIB):
            file.write(os.urandom(MIB))

    def copy() -> float:
        took = _timed(lambda: shutil.copyfile(source, base / "copy.bin"))
        (base / "copy.bin").unlink()
        os.sync()
        return took

    def put() -> float:
        took = _timed(lambda: fs.put_file(str(source), "run/step-1/put.bin"))
        fs.rm_file("run/step-1/put.bin")
        os.sync()
        return took

    plain, passed = alternate([copy, put], plan.sizes.pairs)
    yield spread("fsspec", f"{place}: put_file", ratios(plain, passed), "x", at_least=0.9)
    source.unlink()


def _saved(plan: Plan, place: str, fs: Any, base: Path) -> Iterator[Figure]:
    import torch  # noqa: PLC0415 - only here
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - only here

    options = fs.storage_options
    fsspec.config.conf["ckpt"] = options
    state = {f"w{n}": torch.rand(plan.sizes.stream // 32) for n in range(8)}

    def save(address: str, remove: Callable[[str], Any]) -> float:
        took = _timed(lambda: dcp.save(state, checkpoint_id=address, no_dist=True))
        remove(address)
        os.sync()
        return took

    local, passed = alternate(
        [
            lambda: save(str(base / "local"), shutil.rmtree),
            lambda: save("ckpt://run/step-2", lambda url: fs.rm(url, recursive=True)),
        ],
        plan.sizes.pairs,
    )
    yield spread("fsspec", f"{place}: DCP save", ratios(passed, local), "time", at_most=1.15)
