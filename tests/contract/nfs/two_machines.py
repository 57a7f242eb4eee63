"""Run in the guest: what one client machine does, the other sees at once, through the store's API.

Usage: two_machines.py DIRECTORY1 DIRECTORY2 (the same directory, as each machine has it mounted).
Prints one line for each check that held; any failure is a traceback and exit code 1.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from ckptgate.errors import CkptError, ExistsError, MissingError
from ckptgate.model.documents import Manifest, PointerKind, PointerValue
from ckptgate.ports.store import VerifyMode
from ckptgate.testing.samples import digested, store_checkpoint
from ckptgate_adapters.posix_store import PosixStore

RUN = "exp/run"
ROUNDS = 15
RACERS = 4
FORK = multiprocessing.get_context("fork")


def poll_missing(store: PosixStore, key: str) -> None:
    """Have the client cache that there is no such name."""
    for _ in range(2):
        try:
            store.get(key)
        except MissingError:
            continue
        raise AssertionError(f"{key} is already there")


def check_records(one: PosixStore, two: PosixStore) -> None:
    """A log that both append to in turn; each has just found the next slot empty."""
    for at in range(40):
        writer, reader = (one, two) if at % 2 else (two, one)
        key = f"{RUN}/.ckptgate/log/{at:010d}.json"
        poll_missing(reader, key)
        writer.create(key, b"record %d\n" % at)
        assert reader.get(key) == b"record %d\n" % at
        assert reader.children(f"{RUN}/.ckptgate/log")[-1] == f"{at:010d}.json"
    print("records-are-fresh")


def check_new_directories(one: PosixStore, two: PosixStore) -> None:
    """A name is looked up before any of its directories exists."""
    for at in range(10):
        key = f"{RUN}/.ckptgate/attempts/step-{at}.0/votes/m/0.json"
        poll_missing(two, key)
        assert two.children(os.path.dirname(key)) == []
        one.create(key, b"vote")
        assert two.get(key) == b"vote"
        assert two.children(os.path.dirname(key)) == ["0.json"]
    print("directories-are-fresh")


def check_publications(one: PosixStore, two: PosixStore, spool: str) -> None:
    """Publication, replacement and pointers, each looked at before."""
    for at in range(8):
        name, attempt = f"step-{at // 2}", f"step-{at // 2}.{at % 2}"
        contents = {"model.pt": b"weights %d" % at, "sub/x.bin": os.urandom(70_000)}
        manifest, data = store_checkpoint(one, RUN, attempt, name, spool, contents)
        for entry in manifest.entries:
            key = f"{RUN}/{entry.key}"
            local = os.path.join(spool, f"{attempt}-{os.path.basename(entry.key)}")
            two.verify(key, digested(local), VerifyMode.READBACK)
        earlier = two.published_attempt(RUN, name)
        assert earlier == ("" if at % 2 == 0 else f"{name}.0")
        one.publish(RUN, manifest, data)
        assert two.published_attempt(RUN, name) == attempt
        assert two.plain_read(f"{RUN}/{name}/model.pt", 0, 99) == b"weights %d" % at
        assert two.plain_read(f"{RUN}/{name}/sub/x.bin", 0, 99_999) == contents["sub/x.bin"]
        value = PointerValue(
            pointer="latest", kind=PointerKind.SYMLINK, target=name, content=f"{name}/."[: at + 6]
        )
        two.pointer_content(RUN, "latest")
        one.set_pointer(RUN, value)
        assert two.pointer_content(RUN, "latest") == value.content
        assert two.plain_stat(f"{RUN}/latest").target == value.content
    print("publications-are-fresh")


def race_create(root: str, me: int, barrier: Barrier, won: Queue[tuple[int, int]]) -> None:
    store = PosixStore(root)
    for at in range(ROUNDS):
        barrier.wait(30)
        try:
            store.create(f"race/{at}", b"%d" % me)
        except ExistsError:
            continue
        won.put((at, me))


def check_creating_races(roots: tuple[str, str]) -> None:
    """Racing creators over both machines have one winner in each round."""
    barrier, won = FORK.Barrier(RACERS), FORK.Queue()
    racers = [
        FORK.Process(target=race_create, args=(roots[me % 2], me, barrier, won))
        for me in range(RACERS)
    ]
    for racer in racers:
        racer.start()
    winners = dict(won.get(timeout=60) for _ in range(ROUNDS))
    for racer in racers:
        racer.join(30)
        assert racer.exitcode == 0
    assert sorted(winners) == list(range(ROUNDS))
    assert won.empty()
    for root in roots:
        for at, me in winners.items():
            assert PosixStore(root).get(f"race/{at}") == b"%d" % me
    print("one-creator-wins")


def race_publish(
    root: str, manifest: Manifest, data: bytes, barrier: Barrier, told: Queue[str]
) -> None:
    store = PosixStore(root)
    barrier.wait(30)
    try:
        store.publish(RUN, manifest, data)
    except CkptError as exc:
        told.put(str(exc))
    else:
        told.put("")


def check_publishing_races(roots: tuple[str, str], spool: str) -> None:
    """Two machines publish the same manifest over an older attempt at the same time."""
    one, two = PosixStore(roots[0]), PosixStore(roots[1])
    for at in range(5):
        name = f"raced-{at}"
        one.publish(RUN, *store_checkpoint(one, RUN, f"{name}.0", name, spool, {"m": b"old"}))
        manifest, data = store_checkpoint(one, RUN, f"{name}.1", name, spool, {"m": b"new"})
        barrier, told = FORK.Barrier(2), FORK.Queue()
        racers = [
            FORK.Process(target=race_publish, args=(root, manifest, data, barrier, told))
            for root in roots
        ]
        for racer in racers:
            racer.start()
        assert [told.get(timeout=60) for _ in racers] == ["", ""]
        for racer in racers:
            racer.join(30)
        for store in (one, two):
            assert store.published_attempt(RUN, name) == f"{name}.1"
            assert store.plain_read(f"{RUN}/{name}/m", 0, 9) == b"new"
            assert store.children(f"{RUN}/.ckptgate/attempts/{name}.1") == ["data"]
    print("publishers-agree")


def main(first: str, second: str) -> None:
    place = os.path.basename(tempfile.mkdtemp(dir=first))
    roots = (os.path.join(first, place), os.path.join(second, place))
    one, two = (PosixStore(root) for root in roots)
    started = time.monotonic()
    for store in (one, two):
        store.probe()
        assert store.default_verify is VerifyMode.READBACK
    check_creating_races(roots)
    check_records(one, two)
    check_new_directories(one, two)
    with tempfile.TemporaryDirectory() as spool:
        check_publications(one, two, spool)
        check_publishing_races(roots, spool)
    print(f"took {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
