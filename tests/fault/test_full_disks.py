"""A disk that is full at any step of a save, the spool's or the store's; a store away for an hour.

Real file systems without a free byte; the gateway is the real one in one process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine_harness import Cluster
from tests.fault.test_engine_faults import stage
from tests.fault.test_spool_crash import fill, small_disk
from tests.gateway_harness import Gateway
from tests.saving_trainer import Trainer, result

from ckptgate.engine.settings import PublisherSettings
from ckptgate.ports.store import Store
from ckptgate.testing.faults import FaultPlan, FaultyStore
from ckptgate_adapters.memory_store import MemoryStore
from ckptgate_adapters.posix_store import PosixStore

STEPS_FULL = 25
HOUR_S = 3600.0


class Disk:
    """A file system that can be filled to the last byte, and emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_full = False

    def fill(self) -> None:
        self.is_full = True
        fill(self.path / "filler")

    def free(self) -> None:
        self.is_full = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / "filler")


class Unlucky(Trainer):
    """Its spool's disk gets full before the n-th step, and has room again once it was told."""

    def __init__(self, gateway: Gateway, disk: Disk, at: int) -> None:
        super().__init__(gateway, lambda: None)
        self.disk = disk
        self.at = at
        self.steps = 0

    def until_served(self, action: Callable[[], Any]) -> Any:
        self.steps += 1
        if self.steps == self.at:
            self.disk.fill()
        return super().until_served(action)

    def failed(self, error: OSError) -> None:
        assert error.errno == errno.ENOSPC, error
        super().failed(error)
        self.disk.free()


def save(gateway: Gateway, trainer: Trainer, disk: Disk) -> dict[str, Any]:
    trainer.save()
    gateway.settle()
    trainer.revise()
    gateway.settle()
    disk.free()
    gateway.clock.advance(60.0)
    gateway.settle()
    found = result(gateway)
    del found["nameless"]
    gateway.close()
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("reference")
    gateway = Gateway(base / "spool", MemoryStore())
    trainer = Unlucky(gateway, Disk(base), 0)
    found = save(gateway, trainer, trainer.disk)
    assert set(found["committed"]) == {"step-1"}
    return found


def save_on_full_spool(base: Path, at: int) -> tuple[dict[str, Any], Unlucky]:
    disk = Disk(base)
    gateway = Gateway(base / "spool", MemoryStore())
    gateway.mount.spool.reserve_space()
    trainer = Unlucky(gateway, disk, at)
    return save(gateway, trainer, disk), trainer


def check_full_spool(base: Path, reference: Any, places: range) -> int:
    """How many saves were told that there is no space."""
    told = 0
    for at in places:
        with small_disk(base / str(at), "size=48m") as place:
            found, trainer = save_on_full_spool(place, at)
        assert found == reference, at
        told += bool(trainer.failures)
        if trainer.steps < at:
            break
    return told


def test_a_spool_that_is_full_at_a_step_is_told_and_goes_on_after_it(tmp_path, reference):
    """I10, I11: a sample of all steps."""
    assert check_full_spool(tmp_path, reference, range(4, 60, 11)) > 0


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_spool_that_is_full_at_any_step(tmp_path, reference):
    """I10, I11."""
    assert check_full_spool(tmp_path, reference, range(1, 400)) > 5


def save_on_full_store(base: Path, spool: Path, at: int) -> tuple[dict[str, Any], bool]:
    disk = Disk(base)
    (base / "store").mkdir()
    gateway = Gateway(spool, PosixStore(str(base / "store")))
    trainer = Unlucky(gateway, disk, 0)
    trainer.save()
    did = True
    for _ in range(at):
        did = gateway.publisher.step()
        gateway.clock.advance(1.0)
    disk.fill()
    for _ in range(STEPS_FULL):
        gateway.publisher.step()
        gateway.clock.advance(5.0)
    disk.free()
    gateway.clock.advance(60.0)
    gateway.settle()
    trainer.revise()
    return save_rest(gateway, disk), did


def save_rest(gateway: Gateway, disk: Disk) -> dict[str, Any]:
    gateway.settle()
    found = result(gateway)
    del found["nameless"]
    gateway.close()
    return found


def check_full_store(base: Path, reference: Any, places: range) -> int:
    for count, at in enumerate(places):
        (base / str(at)).mkdir()
        with small_disk(base / str(at) / "disk", "size=4m") as place:
            found, did = save_on_full_store(place, base / str(at) / "spool", at)
        assert found == reference, at
        if not did:
            return count + 1
    return len(places)


def test_a_store_that_is_full_at_a_step_only_delays(tmp_path, reference):
    """I10, I11: from the beginning, and later ones."""
    assert check_full_store(tmp_path, reference, range(0, 6, 2)) >= 2


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_store_that_is_full_at_any_step(tmp_path, reference):
    """I10, I11."""
    assert check_full_store(tmp_path, reference, range(60)) > 4


# A store that is away


class Watched:
    """Publishers' loops on simulated time; what they do is counted."""

    def __init__(self, cluster: Cluster, stores: list[Store]) -> None:
        self.cluster = cluster
        self.nodes = [
            cluster.node(host, store=store) for host, store in zip("ab", stores, strict=True)
        ]
        self.passes = 0

    def run(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> float:
        """Run all loops for so long, or until *is_over*; returns the seconds it took."""
        clock = self.cluster.clock
        began = clock.monotonic()
        due = {node.host: 0.0 for node in self.nodes}
        while clock.monotonic() - began < seconds and not is_over():
            for node in self.nodes:
                if clock.monotonic() < due[node.host]:
                    continue
                stop = threading.Event()
                pauses: list[float] = []

                def wait(pause_s: float, stop=stop, pauses=pauses) -> None:
                    pauses.append(pause_s)
                    stop.set()

                node.publisher.run(stop, wait)
                self.passes += 1
                due[node.host] = clock.monotonic() + max(pauses[0], 0.005)
            clock.advance(max(0.005, min(due.values()) - clock.monotonic()))
        return clock.monotonic() - began


def outage(tmp: Path, settings: PublisherSettings, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp, settings=settings)
    plan = FaultPlan(at=12, is_lasting=True)
    watched = Watched(cluster, [FaultyStore(cluster.store, plan) for _ in range(2)])
    stage(*watched.nodes)
    tracemalloc.start()
    watched.run(HOUR_S / 6)
    assert plan.is_spent
    calls, passes, lines = plan.count, watched.passes, len(caplog.records)
    size = tracemalloc.get_traced_memory()[0]
    caplog.clear()
    watched.run(HOUR_S * 5 / 6)
    grown = tracemalloc.get_traced_memory()[0] - size
    tracemalloc.stop()
    in_rest = watched.passes - passes
    assert in_rest <= 2 * (HOUR_S * 5 / 6) / settings.busy_interval_s + 2, "a busy loop"
    # Each of a dozen things to do asks once in half a minute.
    assert plan.count - calls < 2 * 12 * (HOUR_S / settings.retry_max_s)
    assert len(caplog.records) < 2 * 12 * (HOUR_S / settings.retry_max_s)
    assert grown < 5_000_000, f"{grown} bytes more after {lines} and {len(caplog.records)} lines"
    assert all(len(node.kinds()) < 30 for node in watched.nodes), watched.nodes[0].kinds()
    plan.end()
    took_s = watched.run(120.0, lambda: "step-1" in cluster.state().current)
    assert cluster.state().current, "not committed once the store was back"
    print(f"committed {took_s:.1f} s after the return")
    assert took_s < 2 * settings.retry_max_s + settings.survivor_delay_s + 5
    cluster.check_invariants()
    cluster.close()


def test_a_store_that_is_away_for_an_hour_is_waited_for_in_peace(tmp_path, caplog):
    """I11, I12: bounded calls, log and memory while it is away, a commit soon after."""
    settings = PublisherSettings(
        job_wait_s=0.0, digest_threads=1, upload_threads=1, spool_free_min_share=0.0,
        busy_interval_s=4.0,
    )  # fmt: skip
    outage(tmp_path, settings, caplog)


@pytest.mark.full
def test_an_hour_away_at_the_pace_of_every_day(tmp_path, caplog):
    """I11, I12: with the default intervals."""
    settings = PublisherSettings(spool_free_min_share=0.0, job_wait_s=0.0)
    outage(tmp_path, settings, caplog)
