"""Call by call, the mount does what ext4 does, except for the differences that are on record.

One run of all cases on a local directory, and one in each of: a plain directory and an open
checkpoint, with kernel passthrough and without.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import FAST, Gateway
from tests.posix.differences import DIFFERENCES, table

pytestmark = [pytest.mark.fuse]

ROOT = Path(__file__).parents[2]
PLACES = ("passthrough-plain", "passthrough-checkpoint", "loop-plain", "loop-checkpoint")
Observations = dict[str, Any]


def _observed(directory: Path, result: Path) -> Observations:
    """`case:observation` -> what was seen in *directory*."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.posix", directory, result],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(directory, done.stdout)
    seen = json.loads(result.read_text())
    return {f"{case}:{key}": value for case, found in seen.items() for key, value in found.items()}


def _on_a_mount(base: Path, label: str) -> dict[str, Observations]:
    store = base / f"store-{label}"
    store.mkdir()
    config = f"passthrough = {'true' if label == 'passthrough' else 'false'}\n{FAST}"
    node = Gateway(base, label, store, config).start()
    try:
        found = {}
        for place, name in (("plain", "plain"), ("checkpoint", "step-1")):
            (node.mnt / name).mkdir()
            found[f"{label}-{place}"] = _observed(node.mnt / name, base / f"{label}-{place}.json")
    except BaseException:
        print(node.log()[-6000:])
        raise
    else:
        return found
    finally:
        node.destroy()


@pytest.fixture(scope="module")
def local(tmp_path_factory, require) -> Iterator[Path]:
    """A directory on ext4, for the comparison and for the spools."""
    path = tmp_path_factory.mktemp("local")
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True
    ).stdout.strip()
    if kind == "ext2/ext3":
        yield path
        return
    image, made = path / "image", path / "ext4"
    image.touch()
    os.truncate(image, 4 << 30)
    made.mkdir()
    commands = (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, made])
    is_mounted = all(
        subprocess.run(command, capture_output=True, check=False).returncode == 0
        for command in commands
    )
    require(is_mounted, "no ext4 to compare with, and none can be mounted")
    yield made
    subprocess.run(["umount", "-l", made], check=True)


@pytest.fixture(scope="module")
def seen(local: Path, require) -> dict[str, Observations]:
    """What each place showed, `ext4` among them."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    require(os.geteuid() == 0, "the suite becomes other users, which only root can")
    # Limits of sizes and of sparse files are those of the file system below.
    base = local / "mounts"
    base.mkdir()
    with ThreadPoolExecutor(2) as pool:
        mounts = [pool.submit(_on_a_mount, base, label) for label in ("passthrough", "loop")]
        (local / "cases").mkdir()
        found = {"ext4": _observed(local / "cases", base / "ext4.json")}
        for mount in mounts:
            found.update(mount.result())
    return found


def _differing(seen: dict[str, Observations], place: str) -> dict[str, str]:
    """Observations that differ from ext4's, with both values."""
    here, there = seen[place], seen["ext4"]
    return {
        name: f"ext4 {there.get(name)!r}, here {here.get(name)!r}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name, "not observed") != there.get(name, "not observed")
    }


def test_the_suite_is_large_and_runs_to_its_end_on_ext4(seen):
    assert len(seen["ext4"]) > 1500
    assert [name for name in seen["ext4"] if name.endswith((":raised", ":at"))] == []


@pytest.mark.parametrize("place", PLACES)
def test_nothing_differs_from_ext4_but_what_is_on_record(seen, place):
    unknown = {
        name: values
        for name, values in _differing(seen, place).items()
        if not any(item.covers(place, name) for item in DIFFERENCES)
    }
    assert unknown == {}


@pytest.mark.parametrize("item", DIFFERENCES, ids=lambda item: item.call)
def test_each_difference_on_record_is_still_one(seen, item):
    places = [place for place in PLACES if fnmatch.fnmatchcase(place, item.places)]
    assert places
    for place in places:
        differing = _differing(seen, place)
        for pattern in item.seen:
            assert fnmatch.filter(differing, pattern), (place, pattern)


def test_the_semantics_list_exactly_these_differences():
    text = (ROOT / "gateway/SEMANTICS.md").read_text(encoding="utf-8")
    assert text.count("| call | ext4 | here | why |") == 1
    assert table() in text
