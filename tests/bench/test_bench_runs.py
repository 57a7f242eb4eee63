"""The benchmarks run, with sizes too small to say anything: figures of every subject come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench import machine
from bench.__main__ import SUBJECTS
from bench.pairs import alternate, ratios
from bench.report import Figure, line, spread

ROOT = Path(__file__).parents[2]
ALWAYS = ("write", "commit_many", "s3_requests")
"""They use most of what the others share; the others take minutes together."""


def bench(*words: str, places: tuple[Path, Path]) -> subprocess.CompletedProcess[str]:
    tmpfs, disk = places
    return subprocess.run(
        [sys.executable, "-m", "bench", *words, "--tiny", "--tmpfs", tmpfs, "--disk", disk],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize(
    "subject",
    [
        subject if subject in ALWAYS else pytest.param(subject, marks=pytest.mark.full)
        for subject in SUBJECTS
    ],
)
def test_each_subject_yields_figures(require, tmp_path, subject):
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse can't be opened")
    done = bench(subject, "--json", places=(tmp_path, tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    figures = report["figures"]
    assert figures
    assert {figure["subject"] for figure in figures} == {subject}
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in figures)
    assert any(figure["limit"] is not None for figure in figures)
    assert not list(tmp_path.iterdir()), "something was left behind"
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_an_unknown_subject_is_refused_with_the_known_ones(tmp_path):
    done = bench("wirte", places=(tmp_path, tmp_path))
    assert done.returncode == 2
    assert "wirte" in done.stderr
    assert "write" in done.stderr


def test_each_side_is_measured_once_a_round_in_alternating_order_after_a_warm_up():
    order: list[str] = []

    def side(name: str, value: float):
        def measure() -> float:
            order.append(name)
            return value

        return measure

    natives, mounts = alternate([side("native", 1.0), side("mount", 2.0)], 3)
    assert (natives, mounts) == ([1.0] * 3, [2.0] * 3)
    assert order == ["native", "mount", "mount", "native"] * 2
    assert ratios(natives, mounts) == [0.5] * 3


def test_a_limit_is_met_or_not_by_the_median():
    slow = spread("write", "a", [0.5, 0.9, 1.5], "x", at_least=0.95)
    assert (slow.value, slow.low, slow.high, slow.is_met) == (0.9, 0.5, 1.5, False)
    assert "NOT MET" in line(slow)
    quick = spread("stat", "b", [10.0, 20.0, 90.0], "us", at_most=30)
    assert quick.is_met
    assert "NOT MET" not in line(quick)
    beside = Figure(subject="x", name="y", value=1, low=1, high=1, unit="s")
    assert beside.is_met is None


def test_the_table_says_how_long_idle_cores_of_a_virtual_machine_look_for_work(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(machine, "HALT_POLL", tmp_path / "guest_halt_poll_ns")
    assert "haltpoll" not in machine.describe()
    machine.HALT_POLL.write_text("200000\n")
    assert machine.describe().endswith(", haltpoll 200 us")
