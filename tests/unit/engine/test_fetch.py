"""Nothing unverified is served: chunks are compared before they count."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.unit.engine.kit import CHUNK, Reads, reader_of

from ckptgate.errors import IntegrityError, MissingError, TransientStoreError
from ckptgate.model.layout import data_key, full_key
from ckptgate.ports.spool import ROOT_INO, LocalBytes
from ckptgate.testing.faults import FaultPlan, FaultyStore


def test_only_the_chunks_of_the_range_are_fetched(make_node, small_chunks):
    data = os.urandom(3 * CHUNK + 10)
    node, row, reads = reader_of(make_node, {"x": data})
    file = node.file_at(row, "x")
    assert not node.catalog.is_fetched(file, 0, 1)
    node.catalog.fetch(file, CHUNK + 1, 10)
    assert {offset // CHUNK for _, offset in reads.calls} == {1}
    assert node.catalog.is_fetched(file, CHUNK, CHUNK)
    assert not node.catalog.is_fetched(file, CHUNK - 1, 2)
    assert node.spool.file(file).local is LocalBytes.PARTIAL
    assert node.catalog.is_fetched(file, len(data), 100)  # nothing lies there
    path = Path(node.spool.data_path(file))
    assert path.stat().st_size == len(data)
    assert path.read_bytes()[CHUNK : 2 * CHUNK] == data[CHUNK : 2 * CHUNK]
    assert node.read(row, "x") == data
    assert node.spool.file(file).local is LocalBytes.FULL


def test_a_chunk_is_fetched_once_for_all_readers(make_node, small_chunks):
    data = os.urandom(CHUNK)
    node, row, reads = reader_of(make_node, {"x": data})
    file = node.file_at(row, "x")
    threads = [threading.Thread(target=node.catalog.fetch, args=(file, 0, CHUNK)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads.calls) == len({offset for _, offset in reads.calls})
    assert node.read(row, "x") == data


@pytest.mark.parametrize("at", [0, 1, 999, 1000, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_any_flipped_byte_is_caught_before_it_is_served(make_node, small_chunks, at):
    """I13: names file, chunk and key; an event is recorded."""

    def flip(offset, data):
        if offset <= at < offset + len(data):
            changed = bytearray(data)
            changed[at - offset] ^= 0x10
            return bytes(changed)
        return data

    data = os.urandom(2 * CHUNK + 10)
    node, row, _reads = reader_of(make_node, {"sub/x": data}, flip)
    file = node.file_at(row, "sub/x")
    wanted = rf"run/step-1/sub/x: chunk {at // CHUNK} of run/\.ckptgate/attempts/"
    with pytest.raises(IntegrityError, match=wanted):
        node.catalog.fetch(file, 0, len(data))
    assert not node.catalog.is_fetched(file, at, 1)
    assert [event.kind for event in node.events.recent(5)] == ["verify-failed"]
    # A good read later heals it.
    node.store.change = None
    assert node.read(row, "sub/x") == data


def test_a_shortened_object_is_refused_by_name(make_node, small_chunks):
    """I13."""
    node, row, _ = reader_of(make_node, {"x": b"x" * 100}, lambda _, data: data[:-1])
    with pytest.raises(IntegrityError, match=r"run/step-1/x: .* ends at byte 99 of 100"):
        node.catalog.fetch(node.file_at(row, "x"), 0, 1)


def test_a_lost_object_is_refused_by_name(make_node):
    """I13."""

    def lose(_offset, _data):
        raise MissingError("nothing is there")

    node, row, _ = reader_of(make_node, {"x": b"x"}, lose)
    with pytest.raises(IntegrityError, match="run/step-1/x: nothing is there"):
        node.catalog.fetch(node.file_at(row, "x"), 0, 1)


def test_a_changed_chunk_table_is_refused_by_name(make_node, small_chunks):
    """I13."""
    writer = make_node("writer")
    writer.save("step-1", {"x": os.urandom(CHUNK + 1)})
    store = writer.store

    class Edited(Reads):
        def get(self, key, **kwargs):
            data = store.get(key, **kwargs)
            return bytes([data[0] ^ 1]) + data[1:] if "/chunks/" in key else data

    node = make_node("reader", on=Edited(store))
    row = node.look_into("run", node.directory(ROOT_INO, "run"), "step-1")
    with pytest.raises(IntegrityError, match=r"chunk table .*/chunks/.* was changed"):
        node.catalog.fetch(node.file_at(row, "x"), 0, 1)


def test_with_the_store_away_nothing_is_served_and_nothing_is_blamed(make_node):
    writer = make_node("writer")
    writer.save("step-1", {"x": b"x"})
    plan = FaultPlan(at=1, is_lasting=True, calls=frozenset({"read"}))
    node = make_node("reader", on=FaultyStore(writer.store, plan))
    row = node.look_into("run", node.directory(ROOT_INO, "run"), "step-1")
    with pytest.raises(TransientStoreError):
        node.catalog.fetch(node.file_at(row, "x"), 0, 1)
    assert node.events.recent(5) == []
    plan.end()
    assert node.read(row, "x") == b"x"


@pytest.mark.parametrize("harm", ["changed", "grown", "deleted"])
def test_a_local_copy_that_was_harmed_is_fetched_again(make_node, harm):
    """I13: neither an edited nor a deleted spool file is served."""
    a = make_node("a")
    row = a.save("step-1", {"x": b"good"})
    row = a.look_into("run", row.run_ino, "step-1")
    file = a.file_at(row, "x")
    assert a.catalog.is_fetched(file, 0, 4)
    path = a.spool.data_path(file)
    with open(path, "rb") as held:
        if harm == "changed":
            Path(path).write_bytes(b"evil")
            os.utime(path, ns=(1, 1))
        elif harm == "grown":
            Path(path).write_bytes(b"good+")
        else:
            os.unlink(path)
        before = held.read()
        assert not a.catalog.is_fetched(file, 0, 4)
        assert a.read(row, "x") == b"good"
        held.seek(0)
        assert held.read() == before  # the old file was not written over


def test_a_file_that_is_still_written_is_never_fetched_over(make_node):
    """I11: what is staged is the truth, whatever its times."""
    a = make_node("a")
    row = a.membership.join(a.begin("step-1"))
    file = a.stage(row, "x", b"old")
    Path(a.spool.data_path(file)).write_bytes(b"newer")
    assert a.catalog.is_fetched(file, 0, 5)
    a.catalog.fetch(file, 0, 5)
    assert Path(a.spool.data_path(file)).read_bytes() == b"newer"


def test_an_imported_file_that_was_deleted_here_is_fetched_again(make_node):
    a, b = make_node("a"), make_node("b")
    row_a, row_b = (n.membership.join(n.begin("step-1")) for n in (a, b))
    a.stage(row_a, "x", b"1")
    a.vote(row_a)
    b.catalog.refresh_shared(row_b.id)
    assert b.read(row_b, "x") == b"1"
    os.unlink(b.spool.data_path(b.file_at(row_b, "x")))
    assert b.read(row_b, "x") == b"1"


def test_the_time_that_publication_gives_to_shared_bytes_is_no_change(make_node):
    a = make_node("a")
    row = a.save("step-1", {"x": b"good"})
    row = a.look_into("run", row.run_ino, "step-1")
    file = a.file_at(row, "x")
    mtime_ns = dict(a.spool.tree(row.id))["x"].mtime_ns
    os.utime(a.spool.data_path(file), ns=(mtime_ns, mtime_ns))
    assert not a.catalog.is_fetched(file, 0, 4)
    a.spool.update_file(file, is_linked=True)
    assert a.catalog.is_fetched(file, 0, 4)


def test_an_empty_file_is_made(make_node):
    node, row, reads = reader_of(make_node, {"x": b""})
    assert node.read(row, "x") == b""
    assert reads.calls == []


def test_a_deleted_partial_file_is_begun_anew(make_node, small_chunks):
    data = os.urandom(2 * CHUNK)
    node, row, _ = reader_of(make_node, {"x": data})
    file = node.file_at(row, "x")
    node.catalog.fetch(file, 0, 1)
    os.unlink(node.spool.data_path(file))
    assert not node.catalog.is_fetched(file, 0, 1)
    assert node.read(row, "x") == data


def test_a_file_whose_last_byte_in_the_store_flips_at_rest_is_caught(tmp_path):
    """I13, on a real disk."""
    from tests.unit.engine.kit import Node

    from ckptgate_adapters.posix_store import PosixStore

    (tmp_path / "store").mkdir()
    store = PosixStore(str(tmp_path / "store"))
    a, b = (Node(store, tmp_path / "spools", host) for host in "ab")
    row = a.save("step-1", {"x": b"precious"})
    key = full_key("run", data_key(row.attempt, a.member, a.file_at(row, "x")))
    path = tmp_path / "store" / key
    path.chmod(0o600)
    path.write_bytes(b"preciouS")
    adopted = b.look_into("run", b.directory(ROOT_INO, "run"), "step-1")
    with pytest.raises(IntegrityError, match="run/step-1/x"):
        b.catalog.fetch(b.file_at(adopted, "x"), 0, 1)
    for node in (a, b):
        node.spool.close()


def linked(tmp_path):
    """A node whose committed file `x` is the store's own inode: (node, row, file, its path)."""
    from tests.unit.engine.kit import Node

    from ckptgate_adapters.posix_store import PosixStore

    (tmp_path / "store").mkdir()
    node = Node(PosixStore(str(tmp_path / "store")), tmp_path / "spools", "a")
    row = node.save("step-1", {"x": b"precious"})
    file = node.file_at(row, "x")
    key = tmp_path / "store" / full_key("run", data_key(row.attempt, node.member, file))
    key.unlink()
    os.link(node.spool.data_path(file), key)
    node.spool.update_file(file, is_linked=True)
    row = node.look_into("run", row.run_ino, "step-1")
    return node, row, file, key


def test_an_edit_of_bytes_that_store_and_spool_share_is_caught_where_they_were_written(tmp_path):
    """I13: the spool's name goes, the store's bytes are not touched, and the read is EIO."""
    node, row, file, key = linked(tmp_path)
    assert node.catalog.is_local(file)
    key.write_bytes(b"preciXus")
    assert not node.catalog.is_local(file)
    assert not os.path.exists(node.spool.data_path(file))
    found = node.spool.file(file)
    assert (found.local, found.is_linked) == (LocalBytes.NONE, False)
    with pytest.raises(IntegrityError, match="run/step-1/x"):
        node.catalog.fetch(file, 0, 8)
    assert [event.kind for event in node.events.recent(5)] == ["verify-failed"]
    assert key.read_bytes() == b"preciXus"
    key.write_bytes(b"precious")
    assert node.read(row, "x") == b"precious"
    assert key.stat().st_nlink == 1
    node.spool.close()


def test_a_fetch_never_writes_into_a_file_that_the_store_shares(tmp_path):
    """I9: whatever the rows say, the store's bytes are not written through the spool's name."""
    node, _, file, key = linked(tmp_path)
    key.write_bytes(b"something else, longer")
    node.spool.update_file(file, local=LocalBytes.NONE)
    with pytest.raises(IntegrityError):
        node.catalog.fetch(file, 0, 8)
    assert key.read_bytes() == b"something else, longer"
    node.spool.close()


def test_bytes_of_an_open_attempt_are_never_let_go(make_node):
    """I11: before the COMMIT what is staged is the truth; the publisher digests it again."""
    a = make_node("a")
    row = a.membership.join(a.begin("step-1"))
    file = a.stage(row, "x", b"old")
    a.spool.update_file(file, is_linked=True)
    path = Path(a.spool.data_path(file))
    path.write_bytes(b"newer")
    assert a.catalog.is_local(file)
    assert path.read_bytes() == b"newer"
