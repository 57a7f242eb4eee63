"""universal_pathlib's own suite for implementations, which comes with its source only."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from tests.ckpt.places import Place

pytestmark = pytest.mark.full

SUITE = Path(__file__).with_name("upath_suite.py")
NAME = "universal-pathlib"


@pytest.fixture(scope="module")
def source(require, tmp_path_factory) -> Path:
    """The source of the release that is installed, with its tests."""
    try:
        release = version(NAME)
    except PackageNotFoundError as exc:
        require(False, f"{exc}: pip install --group ecosystem")
    base = tmp_path_factory.mktemp("source")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", NAME]
    done = subprocess.run(
        [*command, "--dest", str(base), f"{NAME}=={release}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = sorted(base.glob("*.tar.gz"))
    require(found, f"the source of {NAME} {release} can't be had: {done.stderr[-500:]}")
    with tarfile.open(found[0]) as archive:
        archive.extractall(base, filter="data")
    (top,) = (path.parent for path in base.glob("*/pyproject.toml"))
    assert (top / "upath/tests/cases.py").is_file()
    return top


@pytest.mark.timeout(900)
def test_its_own_suite_passes(place: Place, source: Path, tmp_path: Path):
    """Outside of checkpoints, and in an open one."""
    words = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib"]
    words += [f"--basetemp={tmp_path / 'base'}", f"--rootdir={source}", "-c", os.devnull]
    # Away from what the tests around it share.
    suite = shutil.copy(SUITE, source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, suite],
        env=os.environ
        | place.env
        | {"PYTHONPATH": str(source), "CI": "", "OPTIONS_OF_TEST": json.dumps(place.options)},
        cwd=source,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"([0-9]+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    # Two times about 120.
    assert int(passed[1]) >= 200, done.stdout[-2000:]
