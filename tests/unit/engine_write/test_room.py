"""A short spool disk: which local copies go, and that nothing else does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine_harness import RUN, Cluster, StagedNode

from ckptgate.app.sections import RoomSection
from ckptgate.engine.evict import Evictor, Room
from ckptgate.engine.fetch import Fetcher
from ckptgate.engine.node import Node
from ckptgate.engine.phases import PhaseClock
from ckptgate.engine.settings import PublisherSettings
from ckptgate.engine.turns import Turns
from ckptgate.model.states import AttemptState
from ckptgate.ports.reserve import reserved_bytes
from ckptgate.ports.spool import (
    NO_FILE,
    ROOM_META,
    AttemptRow,
    HandleRow,
    LocalBytes,
    SpoolRoom,
)
from ckptgate_adapters.posix_store import PosixStore

SIZE = 64 * 1024
TOTAL = 10 * SIZE


def evictor(
    node: StagedNode, cluster: Cluster, free: int, *, room: Callable[[str], Room] | None = None
) -> Evictor:
    """One with *free* of TOTAL bytes free before each round; 3 and 5 of 10 files are its limits."""
    wired = Node(
        store=cluster.store,
        spool=node.spool,
        logs=node.logs,
        membership=node.membership,
        clock=cluster.clock,
        member=node.member,
        events=node.events,
        invalidations=node.forgotten,
        settings=PublisherSettings(spool_free_min_share=0.3, spool_free_target_share=0.5),
        turns=Turns(
            member=node.member,
            member_ids=node.membership.member_ids,
            first_wait_s=5.0,
            doubled_until_s=600.0,
        ),
        meters=node.meters,
        phases=PhaseClock(
            spool=node.spool,
            clock=cluster.clock,
            membership=node.membership,
            meters=node.meters,
        ),
        progress=node.publisher.progress,
        wake=lambda: None,
    )
    return Evictor(wired, room=room or (lambda _path: Room(total=TOTAL, free=free)))


def save(cluster: Cluster, node: StagedNode, name: str) -> tuple[AttemptRow, int]:
    """A committed and published checkpoint with one file."""
    row = node.begin(name)
    file = node.write(row, "w.bin", name.encode().ljust(SIZE, b"."), rank=0)
    node.commit(row)
    cluster.settle()
    assert node.fresh(row).state is AttemptState.COMMITTED
    return row, file


def is_here(node: StagedNode, file: int) -> bool:
    row = node.raw.file(file)
    assert row is not None
    there = os.path.exists(node.raw.data_path(file))
    assert there == (row.local is not LocalBytes.NONE)
    return there


def test_with_room_enough_nothing_goes(cluster: Cluster) -> None:
    node = cluster.node("a")
    _, file = save(cluster, node, "step-1")
    assert not evictor(node, cluster, 3 * SIZE).step()
    assert is_here(node, file)


def test_replaced_copies_go_first_then_the_oldest_until_there_is_room(cluster: Cluster) -> None:
    node = cluster.node("a")
    saved = [save(cluster, node, f"step-{n}") for n in range(5)]
    node.raw.update_attempt(saved[3][0].id, state=AttemptState.REPLACED)
    files = [file for _, file in saved]
    assert evictor(node, cluster, 2 * SIZE).step()
    assert [is_here(node, file) for file in files] == [False, False, True, False, True]
    (event,) = [e for e in node.events.recent(9) if e.kind == "evicted"]
    assert f"3 published files, {3 * SIZE} bytes" in event.detail


def test_the_copies_that_were_not_used_for_longest_go_first(cluster: Cluster) -> None:
    """Those that were fetched from the store too, on a node that only reads."""
    writer, reader = cluster.node("a"), cluster.node("b")
    files: list[int] = []
    for n in range(5):
        row, _ = save(cluster, writer, f"step-{n}")
        files += reader.fetched(row.name)
    newest_ns = max(reader.raw.last_use_ns(file) for file in files)
    for later_ns, file in enumerate((files[1], files[0]), 1):
        before = os.stat(reader.raw.data_path(file))
        with open(reader.raw.data_path(file), "rb") as stream:
            reader.raw.note_use(stream.fileno(), newest_ns + later_ns)
        assert os.stat(reader.raw.data_path(file)).st_mtime_ns == before.st_mtime_ns
    assert evictor(reader, cluster, 2 * SIZE).step()
    assert [is_here(reader, file) for file in files] == [True, True, False, False, False]
    assert evictor(reader, cluster, 0).step()
    assert not any(is_here(reader, file) for file in files)
    assert [reader.raw.last_use_ns(file) for file in files] == [0] * 5


def test_what_was_evicted_is_fetched_and_verified_again(cluster: Cluster) -> None:
    node = cluster.node("a")
    _, file = save(cluster, node, "step-1")
    assert evictor(node, cluster, 0).step()
    assert not is_here(node, file)
    Fetcher(store=cluster.store, spool=node.raw, events=node.events).fetch(file, 0, SIZE)
    assert Path(node.raw.data_path(file)).read_bytes() == b"step-1".ljust(SIZE, b".")
    assert evictor(node, cluster, 0).step()


def test_undecided_given_up_unpublished_and_open_files_stay(cluster: Cluster) -> None:
    node = cluster.node("a")
    _, is_open = save(cluster, node, "step-1")
    node.raw.add_handle(HandleRow(fh=77, ino=1, file=is_open, pid=0, start=0, is_closed=True))
    base, shared = save(cluster, node, "step-2")
    node.begin("step-2", base=base)
    gone = node.begin("step-3")
    aborted = node.write(gone, "w.bin", b"a" * SIZE, rank=0)
    node.event(gone)
    node.publisher.request_abort(gone.id, "test")
    assert node.fresh(gone).state in {AttemptState.ABORTED, AttemptState.ABANDONED}
    young = node.begin("step-4")
    undecided = node.write(young, "w.bin", b"b" * SIZE, rank=0)
    node.step()
    assert NO_FILE not in {is_open, shared, aborted, undecided}
    assert not evictor(node, cluster, 0).step()
    assert all(is_here(node, file) for file in (is_open, shared, aborted, undecided))
    node.raw.drop_handle(77)
    assert evictor(node, cluster, 0).step()
    assert not is_here(node, is_open)


def test_bytes_that_are_committed_but_not_yet_published_stay(cluster: Cluster) -> None:
    node = cluster.node("a")
    row, file = save(cluster, node, "step-1")
    node.raw.update_attempt(row.id, attempt="step-1.99")
    assert not evictor(node, cluster, 0).step()
    assert is_here(node, file)


def test_bytes_that_the_store_shares_stay(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = PosixStore(str(tmp_path / "store"))
    store.probe()
    cluster = Cluster(tmp_path, store=store)
    node = cluster.node("a")
    _, file = save(cluster, node, "step-1")
    assert os.stat(node.raw.data_path(file)).st_nlink > 1
    assert not evictor(node, cluster, 0).step()
    assert is_here(node, file)
    cluster.close()


def test_the_disk_is_looked_at_once_a_second(cluster: Cluster) -> None:
    node = cluster.node("a")
    looks: list[str] = []

    def room(path: str) -> Room:
        looks.append(path)
        return Room(total=TOTAL, free=TOTAL)

    made = evictor(node, cluster, 0, room=room)
    for _ in range(3):
        made.step()
    assert looks == [node.raw.path]
    cluster.clock.advance(1.0)
    made.step()
    assert len(looks) == 2


def test_a_copy_given_up_in_the_middle_of_a_fetch_is_begun_again(cluster: Cluster) -> None:
    """I8: a chunk counts only in the file that it was written to."""
    node = cluster.node("a")
    _, file = save(cluster, node, "step-1")
    assert evictor(node, cluster, 0).step()
    path = Path(node.raw.data_path(file))
    read_into, reads = cluster.store.read_into, []

    def interrupted(key: str, offset: int, view: memoryview) -> int:
        reads.append(key)
        if len(reads) == 1:
            # Given up, and opened by a reader meanwhile, who made the name again.
            path.unlink()
            path.touch()
        return read_into(key, offset, view)

    cluster.store.read_into = interrupted  # type: ignore[method-assign]
    Fetcher(store=cluster.store, spool=node.raw, events=node.events).fetch(file, 0, SIZE)
    assert len(reads) == 2
    assert path.read_bytes() == b"step-1".ljust(SIZE, b".")


@pytest.mark.parametrize(("least", "target"), [(-0.1, 0.4), (0.2, 1.0), (0.5, 0.4)])
def test_shares_that_make_no_sense_are_refused(least: float, target: float) -> None:
    with pytest.raises(ValueError, match=r"room\."):
        RoomSection(free_min_share=least, free_target_share=target)


def test_one_run_s_damaged_log_does_not_keep_the_others_copies(cluster: Cluster) -> None:
    node = cluster.node("a")
    row, _ = save(cluster, node, "step-1")
    other, file = save(cluster, node, "step-2")
    node.raw.update_attempt(row.id, run="../bad", attempt="step-1.99")
    assert other.run == RUN
    assert evictor(node, cluster, 0).step()
    assert not is_here(node, file)


def low_evictor(node: StagedNode, cluster: Cluster, free: list[int]) -> Evictor:
    """One whose disk has *free* bytes free, and what it gives up is added."""
    before = sum(path.stat().st_size for path in Path(node.raw.path).glob("data/*/*"))

    def room(_path: str) -> Room:
        now = sum(path.stat().st_size for path in Path(node.raw.path).glob("data/*/*"))
        return Room(total=TOTAL, free=free[0] + before - now)

    return evictor(node, cluster, 0, room=room)


def test_room_is_made_for_what_is_being_written_as_the_one_before_took_it(
    cluster: Cluster,
) -> None:
    node = cluster.node("a")
    saved = [save(cluster, node, f"step-{n}")[1] for n in range(4)]
    made = low_evictor(node, cluster, [3 * SIZE])
    # With 3 of 10 free there would be enough, if nothing came.
    assert not made.step()
    row = node.begin("step-9")
    cluster.clock.advance(1.0)
    assert made.step()
    assert [is_here(node, file) for file in saved] == [False, False, False, True]
    # What it has staged is needed no more.
    node.write(row, "w.bin", b"9" * SIZE, rank=0)
    assert reserved_bytes(node.raw) == 0
    cluster.clock.advance(1.0)
    assert not made.step()


def test_too_little_room_for_the_next_one_is_told_once_and_its_end_too(cluster: Cluster) -> None:
    node = cluster.node("a")
    row, file = save(cluster, node, "step-1")
    node.raw.add_handle(HandleRow(fh=77, ino=1, file=file, pid=0, start=0, is_closed=True))
    free = [SIZE // 2]
    made = low_evictor(node, cluster, free)
    begun = node.begin("step-2")
    for _ in range(3):
        made.step()
        cluster.clock.advance(1.0)
    (told,) = [event for event in node.events.recent(9) if event.kind == "spool-low"]
    assert f"{SIZE // 2} bytes are free" in told.detail
    assert f"will need {SIZE} more" in told.detail
    assert SpoolRoom.parse(node.raw.get_meta(ROOM_META)).is_low
    node.write(begun, "w.bin", b"2" * SIZE, rank=0)
    free[0] += SIZE
    made.step()
    assert not SpoolRoom.parse(node.raw.get_meta(ROOM_META)).is_low
    assert node.kinds().count("spool-low") == 1
    assert node.kinds()[-1] == "spool-room"
    assert row.run == RUN


def test_a_file_that_is_being_written_counts_as_large_as_it_is(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1")
    row = node.begin("step-2")
    assert reserved_bytes(node.raw) == SIZE
    file = node.write(row, "w.bin", b"2" * (SIZE // 2), rank=0, is_open=True)
    assert reserved_bytes(node.raw) == SIZE // 2
    Path(node.raw.data_path(file)).write_bytes(b"2" * SIZE)
    assert reserved_bytes(node.raw) == 0


def test_what_only_others_wrote_of_the_one_before_needs_no_room_here(cluster: Cluster) -> None:
    writer, reader = cluster.node("a"), cluster.node("b")
    row, _ = save(cluster, writer, "step-1")
    reader.fetched(row.name)
    reader.begin("step-2")
    assert reserved_bytes(reader.raw) == 0
    base = reader.raw.attempts(name="step-1")[-1]
    reader.begin("step-1", base=base)
    assert reserved_bytes(reader.raw) == 0


def test_nothing_is_given_up_where_that_is_switched_off(cluster: Cluster) -> None:
    node = cluster.node("a")
    _, file = save(cluster, node, "step-1")
    node.begin("step-2")
    # The cluster's own settings: a share of 0.
    for _ in range(3):
        node.step()
        cluster.clock.advance(1.0)
    assert is_here(node, file)


def test_what_is_above_a_limit_goes_whatever_the_shares_say(cluster: Cluster) -> None:
    node = cluster.node("a")
    saved = [save(cluster, node, f"step-{n}")[1] for n in range(3)]
    # Less than the spool takes by itself.
    cluster.settings = replace(cluster.settings, spool_max_bytes=1 << 16)
    assert cluster.settings.spool_free_min_share == 0
    node = cluster.node("a")
    node.step()
    assert not any(is_here(node, file) for file in saved)
