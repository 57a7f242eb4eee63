"""A trainer that saves through `gateway_harness`, tries again what failed, and outlives crashes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.gateway_harness import Gateway

from ckptgate.model.states import UNDECIDED
from ckptgate.testing.faults import CrashError
from ckptgate.vfs.interface import Caller
from ckptgate_adapters.memory_store import MemoryStore

ALLOWED = {errno.EIO, errno.ENOSPC, errno.EBUSY, errno.EAGAIN}
TRIES = 4


class Plan:
    """Counts calls, and says which one fails; that one only."""

    def __init__(self, at: int, error: Callable[[], BaseException], *, is_after: bool) -> None:
        self.at = at
        self.error = error
        self.is_after = is_after
        self.is_lasting = False
        self.count = 0
        self.hit = ""
        self.is_armed = False

    def run(self, name: str, call: Callable[[], Any], undo: Callable[[], object]) -> Any:
        if not self.is_armed:
            return call()
        if self.is_lasting and self.hit:
            raise self.error()
        self.count += 1
        if self.count != self.at:
            return call()
        self.hit = name
        if self.is_after:
            call()
        else:
            undo()
        raise self.error()


class Trainer:
    """Saves through the gateway; what fails is tried again, a failed file from its beginning."""

    def __init__(self, gateway: Gateway, on_crash: Callable[[], None]) -> None:
        self.gateway = gateway
        self.on_crash = on_crash
        self.failures: list[OSError] = []

    def do(self, action: Callable[[Caller], Any]) -> Any:
        """One system call: tried again after an error, sent again after a crash."""
        for _ in range(TRIES):
            with self.gateway.request() as caller:
                try:
                    return self.until_served(partial(action, caller))
                except OSError as exc:
                    self.failed(exc)
        raise AssertionError(self.failures)

    def failed(self, error: OSError) -> None:
        """An error that a trainer may see of a disk; anything else is wrong."""
        assert error.errno in ALLOWED, error
        self.failures.append(error)

    def until_served(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except CrashError:
            self.on_crash()
            return action()

    def put(self, path: str, data: bytes, *, is_synced: bool = False) -> None:
        for _ in range(TRIES):
            fh = self.do(lambda caller: self.gateway.open_new(caller, path))
            try:
                self._fill(fh, data, is_synced=is_synced)
            except OSError as exc:
                self.failed(exc)
            else:
                return
        raise AssertionError(self.failures)

    def _fill(self, fh: int, data: bytes, *, is_synced: bool) -> None:
        gateway = self.gateway
        caller = Caller(0, 0, 4000, may_block=True)
        try:
            fd = self.until_served(lambda: gateway.opened(fh).fd)
            os.pwrite(fd, data, 0)
            if is_synced:
                self.until_served(lambda: gateway.vfs.fsync(caller, fh, data_only=False))
            self.until_served(lambda: gateway.vfs.flush(caller, fh))
        finally:
            # The kernel doesn't care what comes of it.
            with contextlib.suppress(OSError):
                self.until_served(lambda: gateway.vfs.release(fh))

    def save(self) -> None:
        gateway = self.gateway
        self.do(lambda c: gateway.mkdir(c, "run"))
        self.put("run/log.txt", b"begins\n")
        self.do(lambda c: gateway.mkdir(c, "run/step-1"))
        self.do(lambda c: gateway.mkdir(c, "run/step-1/deep"))
        self.put("run/step-1/a.bin", b"a" * 5000, is_synced=True)
        self.put("run/step-1/a.bin", b"b" * 3000)
        self.put("run/step-1/deep/new", b"c" * 4000)
        self.do(lambda c: gateway.rename(c, "run/step-1/deep/new", "run/step-1/deep/c.bin"))
        self.put("run/step-1/gone", b"x")
        self.do(lambda c: gateway.unlink(c, "run/step-1/gone"))
        self.do(lambda c: gateway.symlink(c, "step-1", "run/latest"))
        self.do(lambda c: gateway.commit(c, "run/step-1"))

    def revise(self) -> None:
        """A file of the committed checkpoint is written again: a revision."""
        self.put("run/step-1/a.bin", b"d" * 2000)
        self.put("run/log.txt", b"goes on\n")
        self.do(lambda c: self.gateway.commit(c, "run/step-1"))


def settle(gateway: Gateway, on_crash: Callable[[], None]) -> None:
    for _ in range(6):
        try:
            gateway.settle(rounds=300)
        except CrashError:
            on_crash()
        else:
            return


def result(gateway: Gateway) -> dict[str, Any]:
    """What everybody sees, and that the spool holds nothing else."""
    gateway.vfs.finish_releases()
    gateway.settle()
    gateway.mount.spool.finish_removals()
    gateway.engine.spool.finish_removals()
    spool = gateway.engine.spool
    left = [row for row in gateway.attempts() if row.state in UNDECIDED]
    assert not left, [(row.name, row.state, row.reason, row.missing) for row in left]
    assert spool.handles() == []
    for row in gateway.attempts():
        for path, _, file in spool.files_of_attempt(row.id):
            assert os.path.exists(spool.data_path(file.file)), path
    return {**gateway.outcome("run"), "log": gateway.read("run/log.txt")}


def whole_save(base: Path, wrap: Callable[[Gateway], None], plan: Plan | None) -> dict[str, Any]:
    """A save and a revision under *plan*; what came of it."""
    gateway = Gateway(base / "spool", MemoryStore())
    wrap(gateway)

    def restart() -> None:
        """Whatever died is begun anew; the kernel keeps its session."""
        assert plan is not None
        plan.is_armed = False
        gateway.kill_mount()
        gateway.kill_publisher()
        gateway.start_publisher()
        gateway.start_mount(is_takeover=True)

    if plan is not None:
        plan.is_armed = True
    trainer = Trainer(gateway, restart)
    trainer.save()
    settle(gateway, restart)
    trainer.revise()
    settle(gateway, restart)
    if plan is not None:
        plan.is_armed = False
    found = result(gateway)
    # Nothing of it was only in memory.
    gateway.kill_mount()
    gateway.kill_publisher()
    again = Gateway(base / "spool", gateway.store, clock=gateway.clock)
    later = result(again)
    again.close()
    assert later.pop("nameless") == 0
    # The kernel was never made to forget anything.
    del found["nameless"]
    assert later == found
    return {**found, "failures": len(trainer.failures)}
