"""What a long run leaves in the spool: as much as its checkpoints need, however often it saves."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.harness import Gateway, until

from ckptgate_adapters.sqlite_spool import SqliteSpool

pytestmark = pytest.mark.slow


def spool_files(gateway: Gateway) -> list[int]:
    """Sizes of all staged files."""
    places = (gateway.spool / "data").rglob("*")
    return sorted(place.stat().st_size for place in places if place.is_file())


def stored(gateway: Gateway) -> bytes:
    """The whole file as the store has it."""
    place = gateway.store / "best.bin"
    return place.read_bytes() if place.exists() else b""


def has_stored(gateway: Gateway, version: bytes) -> bool:
    """Whether the store has that version."""
    return stored(gateway) == version


@pytest.fixture
def gateway(tmp_path: Path, require):
    require(os.path.exists("/dev/fuse"), "no /dev/fuse")
    store = tmp_path / "store"
    store.mkdir()
    made = Gateway(tmp_path, "a", store)
    made.start()
    yield made
    made.destroy()


def test_an_overwritten_whole_file_leaves_one_version_in_the_spool(gateway: Gateway) -> None:
    """best.bin after every epoch: the versions before it go once they are replaced."""
    for epoch in range(4):
        version = b"%d" % epoch * (100_000 + epoch)
        (gateway.mnt / "best.bin").write_bytes(version)
        until("published", partial(has_stored, gateway, version))
    until("one version left", lambda: spool_files(gateway) == [100_003])
    spool = SqliteSpool.attach(str(gateway.spool))
    try:
        until("no node without a name", lambda: spool.nameless_nodes() == [])
    finally:
        spool.close()
    assert (gateway.mnt / "best.bin").read_bytes() == b"3" * 100_003


def test_a_version_that_somebody_reads_stays_until_it_is_closed(gateway: Gateway) -> None:
    place = gateway.mnt / "best.bin"
    place.write_bytes(b"old" * 1000)
    until("published", lambda: stored(gateway))
    with open(place, "rb") as reading:
        assert reading.read(3) == b"old"
        place.write_bytes(b"new" * 2000)
        until("replaced", lambda: stored(gateway)[:3] == b"new")
        assert reading.read() == b"old" * 999
    until("one version left", lambda: spool_files(gateway) == [6000])
