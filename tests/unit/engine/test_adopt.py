"""A committed checkpoint's tree in the spool is exactly its manifest."""

from __future__ import annotations

import contextlib
import mmap
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptgate.engine.adopt import adopt, load_manifest
from ckptgate.errors import IntegrityError, MissingError
from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    Manifest,
    decode,
    digest_of,
    encode,
)
from ckptgate.model.entries import Quarantine
from ckptgate.model.layout import data_key, manifest_key
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import ROOT_INO, HandleRow, LocalBytes

MEMBER = "host-00000000"


def file_entry(path, **changes):
    values: dict[str, Any] = {
        "type": EntryType.FILE,
        "mode": 0o644,
        "mtime_ns": 5,
        "size": 1,
        "digest": digest_of(b"x"),
        "key": data_key("step-1.0", MEMBER, 1),
    }
    return FileEntry(path=path, **(values | changes))


def make_manifest(entries, **changes) -> Manifest:
    values: dict[str, Any] = {
        "run": "run",
        "name": "step-1",
        "attempt": "step-1.0",
        "generation": 1,
        "event": "explicit",
        "created_at": "2026-01-01T00:00:00.000Z",
        "members": (MEMBER,),
    }
    return Manifest(entries=tuple(entries), **(values | changes))


def put_manifest(store, data: bytes) -> str:
    digest = digest_of(data)
    store.create(manifest_key("run", "step-1.0", digest), data)
    return digest


def test_another_nodes_checkpoint_gets_a_tree_without_bytes(make_node):
    a, b = make_node("a"), make_node("b")
    saved = a.save("step-1", {"x": b"1", "sub/deep/y": b"22", "sub/z": b""})
    run_ino = b.directory(ROOT_INO, "run")
    row = b.look_into("run", run_ino, "step-1")
    assert row.state is AttemptState.COMMITTED
    assert row.attempt == "step-1.0"
    assert b.paths(row) == a.paths(saved)
    assert b.spool.file(b.file_at(row, "x")).local is LocalBytes.NONE
    assert b.read(row, "sub/deep/y") == b"22"
    assert b.read(row, "sub/z") == b""
    assert b.look_into("run", run_ino, "step-1") == row


def test_own_nodes_and_bytes_stay(make_node):
    a = make_node("a")
    saved = a.save("step-1", {"x": b"1", "sub/y": b"2"})
    before = a.spool.tree(saved.id)
    row = a.look_into("run", saved.run_ino, "step-1")
    assert (row.id, row.root) == (saved.id, saved.root)
    assert a.spool.tree(row.id) == before
    for path in ("x", "sub/y"):
        assert a.spool.file(a.file_at(row, path)).local is LocalBytes.FULL


def test_the_tree_is_completed_with_other_members_files(make_node):
    a, b = make_node("a"), make_node("b")
    row_a, row_b = (n.membership.join(n.begin("step-1")) for n in (a, b))
    a.stage(row_a, "rank0", b"0")
    b.stage(row_b, "rank1", b"1")
    a.seal(row_a)
    b.vote(row_b)
    a.vote(row_a)
    a.close(row_a)
    a.commit(row_a)
    for node, row in ((a, row_a), (b, row_b)):
        node.logs.get("run").refresh()
        adopted = node.look_into("run", row.run_ino, "step-1")
        assert adopted.id == row.id
        assert (node.read(adopted, "rank0"), node.read(adopted, "rank1")) == (b"0", b"1")


def test_what_is_not_in_the_manifest_loses_its_name(make_node):
    """I8."""
    a = make_node("a")
    row = a.membership.join(a.begin("step-1"))
    a.stage(row, "x", b"1")
    a.stage(row, "keep/x", b"1")
    a.decide(row)
    a.stage(row, "stray/file", b"2")
    a.stage(row, "keep/stray", b"3")
    row = a.look_into("run", row.run_ino, "step-1")
    assert set(a.paths(row)) == {"x", "keep", "keep/x"}


def test_a_newer_save_replaces_the_older_one(make_node):
    """I8: a reader sees one attempt."""
    a, b = make_node("a"), make_node("b")
    first = a.save("last", {"x": b"1"})
    first = a.look_into("run", first.run_ino, "last")
    run_ino = b.directory(ROOT_INO, "run")
    old = b.look_into("run", run_ino, "last")
    a.save("last", {"x": b"2", "y": b"3"})
    b.catalog.view("run", 0.0)
    new = b.look_into("run", run_ino, "last")
    assert b.spool.attempt(old.id).state is AttemptState.REPLACED
    assert (new.attempt, b.read(new, "x")) == ("last.1", b"2")
    assert b.read(old, "x") == b"1"  # whoever has it open goes on


def test_an_attempt_that_this_node_gave_up_is_read_in_a_tree_of_its_own(make_node):
    a, b = make_node("a"), make_node("b")
    given_up = b.membership.join(b.begin("step-1"))
    b.spool.update_attempt(given_up.id, state=AttemptState.ABANDONED)
    row = a.membership.join(a.begin("step-1"))
    a.stage(row, "x", b"1")
    a.decide(row)
    adopted = b.look_into("run", given_up.run_ino, "step-1")
    assert adopted.id != given_up.id
    assert b.spool.attempt(given_up.id).state is AttemptState.ABANDONED


def test_a_torn_local_file_is_replaced_by_the_stores(make_node):
    """I8: local bytes whose digest isn't the manifest's are not served."""
    a = make_node("a")
    row = a.save("step-1", {"x": b"1"})
    a.spool.update_file(a.file_at(row, "x"), state=FileState.QUIET)
    old = a.file_at(row, "x")
    row = a.look_into("run", row.run_ino, "step-1")
    assert a.file_at(row, "x") != old
    assert a.read(row, "x") == b"1"


@pytest.mark.parametrize("left", ["handle", "descriptor", "mapping"])
def test_bytes_that_somebody_may_still_write_are_replaced_by_the_stores(make_node, left):
    """I8: a child that kept the descriptor, or a shared mapping, writes after the COMMIT."""
    a = make_node("a")
    row = a.save("step-1", {"sub/x": b"1", "y": b"2"})
    before, old = dict(a.spool.tree(row.id)), a.file_at(row, "sub/x")
    local = a.spool.data_path(old)
    with contextlib.ExitStack() as stack:
        if left == "handle":
            ino = before["sub/x"].ino
            a.spool.add_handle(HandleRow(fh=7, ino=ino, file=old, pid=1, start=1, is_closed=True))
        elif left == "descriptor":
            stack.enter_context(open(local, "r+b"))
        else:
            with open(local, "r+b") as stream:
                stack.enter_context(mmap.mmap(stream.fileno(), 0))
        row = a.look_into("run", row.run_ino, "step-1")
        after = dict(a.spool.tree(row.id))
        Path(local).write_bytes(b"?")
        assert a.read(row, "sub/x") == b"1"
    assert after["sub/x"].ino != before["sub/x"].ino
    assert a.file_at(row, "sub/x") != old
    assert after["y"] == before["y"]
    assert a.spool.node(before["sub/x"].ino) is not None, "whoever has it open goes on"
    assert (before["sub"].ino, "x") in a.invalidated.names
    assert (before["sub/x"].ino, "") in a.invalidated.names
    assert (row.root, "y") not in a.invalidated.names


def test_symlinks_and_empty_directories_are_adopted(make_node):
    a = make_node("a")
    entries = [
        FileEntry(path="d", type=EntryType.DIR, mode=0o700, mtime_ns=7),
        FileEntry(path="link", type=EntryType.SYMLINK, mode=0o777, mtime_ns=7, target="d/x"),
    ]
    row = adopt(a.spool, "run", ROOT_INO, make_manifest(entries), "0" * 64)
    nodes = dict(a.spool.tree(row.id))
    assert (nodes["d"].mode, nodes["d"].mtime_ns) == (0o700, 7)
    assert nodes["link"].target == "d/x"
    assert adopt(a.spool, "run", ROOT_INO, make_manifest(entries), "0" * 64) == row


def test_ten_thousand_entries_are_adopted_in_seconds(make_node):
    a = make_node("a")
    entries = [file_entry(f"d{i % 100:02d}/f{i:05d}") for i in range(10_000)]
    manifest = make_manifest(sorted(entries, key=lambda e: e.path))
    started = time.monotonic()
    row = adopt(a.spool, "run", ROOT_INO, manifest, "0" * 64)
    assert time.monotonic() - started < 15
    assert len(a.spool.tree(row.id)) == 10_100


def test_what_is_not_committed_or_is_quarantined_is_missing(make_node):
    a = make_node("a")
    row = a.save("step-1", {"x": b"1"})
    with pytest.raises(MissingError, match="is not committed"):
        a.look_into("run", row.run_ino, "step-2")
    a.logs.get("run").append(lambda _: Quarantine(name="step-1", reason="bad disk"))
    assert "step-1" not in a.catalog.view("run", 0.0).committed
    with pytest.raises(MissingError, match="bad disk"):
        a.look_into("run", row.run_ino, "step-1")


# Hostile and damaged manifests (I13)


def test_every_flipped_bit_of_a_manifest_is_refused_by_name(store):
    """I13."""
    data = encode(make_manifest([file_entry("x")]))
    digest = digest_of(data)
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        key = manifest_key(f"run{at}", "step-1.0", digest)
        store.create(key, bytes(changed))
        with pytest.raises(IntegrityError, match="manifest-"):
            load_manifest(store, f"run{at}", "step-1.0", digest)


def test_a_missing_manifest_is_refused_by_name(store):
    """I13."""
    with pytest.raises(IntegrityError, match="is missing, but the log says"):
        load_manifest(store, "run", "step-1.0", "0" * 64)


def test_a_manifest_of_another_attempt_is_refused(store):
    """I13."""
    digest = put_manifest(store, encode(make_manifest([], attempt="step-1.7")))
    with pytest.raises(IntegrityError, match=r"step-1\.7"):
        load_manifest(store, "run", "step-1.0", digest)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\nb", "x" * 300]
)
def test_a_hostile_path_is_refused_by_name(store, path):
    """I13: no path leaves its checkpoint."""
    raw = msgspec.json.decode(encode(make_manifest([file_entry("x")])))
    raw["entries"][0]["path"] = path
    digest = put_manifest(store, msgspec.json.encode(raw) + b"\n")
    with pytest.raises(IntegrityError, match="manifest-"):
        load_manifest(store, "run", "step-1.0", digest)


@pytest.mark.parametrize(
    "key",
    [
        ".ckptgate/log/0000000000.json",
        ".ckptgate/attempts/step-1.0/data/host-00000000",
        ".ckptgate/attempts/step-1.0/votes/host-00000000/0.json",
        ".ckptgate/attempts/step-1/data/host-00000000/1",
        "step-9/secret",
    ],
)
def test_a_key_outside_the_data_is_refused_by_name(store, key):
    """I13."""
    digest = put_manifest(store, encode(make_manifest([file_entry("x", key=key)])))
    with pytest.raises(IntegrityError, match="is not one of a run's data"):
        load_manifest(store, "run", "step-1.0", digest)


def test_a_tree_below_a_file_is_refused_by_name(store):
    """I13."""
    link = FileEntry(path="x", type=EntryType.SYMLINK, mode=0o777, mtime_ns=0, target="y")
    raw = msgspec.json.decode(encode(make_manifest([link, file_entry("y/z")])))
    raw["entries"][1]["path"] = "x/y"
    digest = put_manifest(store, msgspec.json.encode(raw) + b"\n")
    with pytest.raises(IntegrityError, match=r"manifest-.*is no directory"):
        load_manifest(store, "run", "step-1.0", digest)


def test_the_manifest_decodes_to_what_was_written(store):
    manifest = make_manifest([file_entry("x")])
    digest = put_manifest(store, encode(manifest))
    assert load_manifest(store, "run", "step-1.0", digest) == manifest
    assert decode(encode(manifest), Manifest, subject="x") == manifest
