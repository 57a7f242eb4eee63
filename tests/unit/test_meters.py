"""Meters in memory that processes share: they survive kills, restarts and other releases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptgate.ports.meters import (
    METERS,
    NO_METERS,
    PASSTHROUGH,
    REQUEST_SECONDS,
    SAVES,
    UPLOAD_ERRORS,
    UPLOADED_BYTES,
    MeterKind,
)
from ckptgate_adapters.metrics.mapped import MappedMeters, meters_path, open_meters, read_meters

KILLED = """
import os, signal, sys
from ckptgate.ports.meters import SAVES
from ckptgate_adapters.metrics.mapped import open_meters
meters = open_meters(sys.argv[1], "publisher")
for _ in range(3):
    meters.add(SAVES, label="committed")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_is_counted_survives_kill_9(tmp_path: Path):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert read_meters(str(tmp_path))[SAVES.name]["committed"].value == 6


def test_the_processes_numbers_are_summed(tmp_path: Path):
    for process, count in (("mount", 2), ("publisher", 5)):
        meters = open_meters(str(tmp_path), process)
        meters.add(UPLOADED_BYTES, count)
        meters.observe(REQUEST_SECONDS, count, "look")
    found = read_meters(str(tmp_path))
    assert found[UPLOADED_BYTES.name][""].value == 7
    look = found[REQUEST_SECONDS.name]["look"]
    assert (look.value, sum(look.buckets), look.longest) == (7, 2, 5)


def test_a_measurement_is_in_its_bucket(tmp_path: Path):
    meters = open_meters(str(tmp_path), "mount")
    bounds = REQUEST_SECONDS.buckets
    for value in (0.0, bounds[0], bounds[0] * 1.01, bounds[-1], bounds[-1] * 10):
        meters.observe(REQUEST_SECONDS, value, "write")
    buckets = read_meters(str(tmp_path))[REQUEST_SECONDS.name]["write"].buckets
    assert len(buckets) == len(bounds) + 1
    assert (buckets[0], buckets[1], buckets[-2], buckets[-1]) == (2, 1, 1, 1)


def test_the_longest_of_an_hour_ago_is_forgotten(tmp_path: Path, monkeypatch):
    now_s = 6000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    meters = open_meters(str(tmp_path), "mount")

    def longest() -> float:
        return read_meters(str(tmp_path))[REQUEST_SECONDS.name]["look"].longest

    meters.observe(REQUEST_SECONDS, 9.0, "look")
    assert longest() == 9
    now_s += 60
    meters.observe(REQUEST_SECONDS, 3.0, "look")
    assert longest() == 9
    now_s += 60
    assert longest() == 3
    now_s += 3600
    assert longest() == 0


def test_threads_lose_no_count(tmp_path: Path):
    meters = open_meters(str(tmp_path), "mount")

    def count() -> None:
        for _ in range(5000):
            meters.add(SAVES, label="committed")

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(0.005)
    assert read_meters(str(tmp_path))[SAVES.name]["committed"].value == 20000


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100_000])
def test_another_release_s_file_is_begun_anew(tmp_path: Path, content: bytes):
    """I13."""
    path = Path(meters_path(str(tmp_path), "mount"))
    path.write_bytes(content)
    assert read_meters(str(tmp_path))[UPLOADED_BYTES.name][""].value == 0
    open_meters(str(tmp_path), "mount").add(UPLOADED_BYTES, 4)
    assert read_meters(str(tmp_path))[UPLOADED_BYTES.name][""].value == 4


def test_a_label_that_nobody_listed_counts_as_other(tmp_path: Path):
    meters = open_meters(str(tmp_path), "mount")
    meters.add(UPLOAD_ERRORS, label="of the next release")
    assert read_meters(str(tmp_path))[UPLOAD_ERRORS.name]["other"].value == 1


def test_without_room_for_them_the_daemon_goes_on(tmp_path: Path, monkeypatch, caplog):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    assert open_meters(str(tmp_path), "mount") is NO_METERS
    assert "meters-off" in caplog.text
    os.symlink(tmp_path / "elsewhere", meters_path(str(tmp_path), "publisher"))
    assert open_meters(str(tmp_path), "publisher") is NO_METERS
    assert not (tmp_path / "elsewhere").exists()


def test_after_the_end_counting_is_no_error(tmp_path: Path):
    meters = MappedMeters(meters_path(str(tmp_path), "mount"))
    meters.set(PASSTHROUGH, 1)
    meters.close()
    meters.add(SAVES, label="committed")
    meters.observe(REQUEST_SECONDS, 1.0, "look")
    found = read_meters(str(tmp_path))
    assert (found[PASSTHROUGH.name][""].value, found[SAVES.name]["committed"].value) == (1, 0)


def test_names_follow_the_conventions():
    for meter in METERS:
        assert meter.name.startswith("ckptgate_")
        assert meter.name.endswith("_total") is (meter.kind is MeterKind.COUNTER), meter.name
        assert bool(meter.label) is (meter.values != ("",))
        assert meter.buckets == tuple(sorted(meter.buckets))
