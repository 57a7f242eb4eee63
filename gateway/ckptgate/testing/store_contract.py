"""The store's contract as tests. An adapter's test subclasses `StoreContract` with a factory.

    class TestMyStore(StoreContract):
        def make_store(self, place: str) -> Store:
            return MyStore(place)

Two stores made with the same *place* must show the same contents (two clients of one store); an
adapter that can't be opened twice returns the same object.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptgate.errors import (
    CkptError,
    ExistsError,
    FormatVersionError,
    IntegrityError,
    InvalidNameError,
    MissingError,
    RefusedError,
    UsageError,
)
from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    Manifest,
    PointerKind,
    PointerValue,
    encode,
)
from ckptgate.model.layout import attempt_prefix, full_key
from ckptgate.ports.store import PlainEntry, PlainKind, Store, VerifyMode
from ckptgate.testing.reclaim_contract import ReclaimContract
from ckptgate.testing.samples import MTIME_NS, digested, manifest_of, store_checkpoint, store_file

__all__ = ["StoreContract"]

_RUN = "exp/run-7"
_ROUNDS = 20
_RACERS = 4


def _write(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def _tree(store: Store, path: str) -> dict[str, bytes | str]:
    """Everything below a plain directory: bytes of files, targets of symlinks, "/" for others."""
    found: dict[str, bytes | str] = {}
    for entry in store.plain_list(path):
        key = f"{path}/{entry.name}"
        match entry.kind:
            case PlainKind.FILE:
                found[entry.name] = store.plain_read(key, 0, entry.size + 1)
            case PlainKind.SYMLINK:
                found[entry.name] = f"-> {entry.target}"
            case PlainKind.DIR:
                found[entry.name] = "/"
                below = _tree(store, key)
                found.update({f"{entry.name}/{name}": value for name, value in below.items()})
    return found


class StoreContract(ReclaimContract):
    """What every store must keep."""

    def make_store(self, place: str) -> Store:
        """A store at *place*, a name unique to the test (a directory that exists)."""
        raise NotImplementedError

    def make_place(self, tmp_path: Path) -> str:
        """The place of this test's store; empty."""
        place = tmp_path / "store"
        place.mkdir()
        return str(place)

    @pytest.fixture(name="place")
    def _place(self, tmp_path: Path) -> str:
        return self.make_place(tmp_path)

    @pytest.fixture(name="store")
    def _store(self, place: str) -> Store:
        return self.make_store(place)

    @pytest.fixture(name="other")
    def _other(self, place: str, store: Store) -> Store:  # noqa: ARG002  the first is made first
        """Another client of the same store."""
        return self.make_store(place)

    # What it is

    def test_a_usable_store_passes_its_probe_and_the_probe_leaves_nothing(
        self, store: Store
    ) -> None:
        store.probe()
        store.probe()
        assert store.plain_list("") == []
        assert store.children("") == []
        assert store.url

    def test_a_store_of_another_format_version_is_refused(self, store: Store) -> None:
        store.create(".ckptgate/format.json", b'{"format":99}\n')
        with pytest.raises(FormatVersionError, match="99"):
            store.probe()

    # Records

    def test_a_created_record_is_read_back_as_it_was(self, store: Store, other: Store) -> None:
        store.create("exp/.ckptgate/log/0000000000.json", b"one\n")
        store.create("top.json", b"")
        assert store.get("exp/.ckptgate/log/0000000000.json") == b"one\n"
        assert other.get("exp/.ckptgate/log/0000000000.json") == b"one\n"
        assert other.get("top.json") == b""

    def test_a_record_is_never_replaced(self, store: Store, other: Store) -> None:
        """I7: the log is immutable."""
        store.create("k/a", b"first")
        with pytest.raises(ExistsError) as raised:
            other.create("k/a", b"second")
        assert raised.value.subject == "k/a"
        for longer in (b"first and more", b"fir", b""):
            with pytest.raises(ExistsError):
                store.create("k/a", longer)
        assert store.get("k/a") == b"first"

    def test_creating_the_same_bytes_again_is_success(self, store: Store, other: Store) -> None:
        """I6: an earlier call landed, whose reply was lost."""
        store.create("k/a", b"mine")
        store.create("k/a", b"mine")
        other.create("k/a", b"mine")
        assert other.get("k/a") == b"mine"

    def test_a_missing_record_is_missing_and_found_as_soon_as_it_is_there(
        self, store: Store, other: Store
    ) -> None:
        for number in range(3):
            key = f"deep/er/log/{number}"
            with pytest.raises(MissingError):
                other.get(key)
            store.create(key, b"x")
            assert other.get(key) == b"x"

    def test_a_record_larger_than_the_limit_is_refused(self, store: Store) -> None:
        store.create("k", b"12345")
        assert store.get("k", limit=5) == b"12345"
        with pytest.raises(IntegrityError, match="larger"):
            store.get("k", limit=4)

    def test_children_are_sorted_names_and_fresh(self, store: Store, other: Store) -> None:
        assert store.children("a/members") == []
        for name in ("m-2", "m-1", "m-3"):
            store.create(f"a/members/{name}.json", b"x")
            assert f"{name}.json" in other.children("a/members")
        assert store.children("a/members") == ["m-1.json", "m-2.json", "m-3.json"]
        assert store.children("a") == ["members"]
        assert store.children("") == ["a"]

    @pytest.mark.parametrize(
        "key", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "a/\n", "a/\ud800", "x" * 300]
    )
    def test_a_hostile_key_is_refused_by_every_call(
        self, store: Store, key: str, tmp_path: Path
    ) -> None:
        """I13: bad input is an error that names it."""
        source = digested(_write(tmp_path / "spool" / "f", b"x"))
        calls = (
            lambda: store.create(key, b"x"),
            lambda: store.get(key),
            lambda: store.put(key, source),
            lambda: store.read(key, 0, 1),
            lambda: store.verify(key, source, store.default_verify),
            lambda: store.local_path(key),
            lambda: store.plain_put(key, source.path, mode=0o644, mtime_ns=0),
            lambda: store.plain_rename(key, "b"),
            lambda: store.plain_remove(key, is_dir=False),
        )
        for call in calls:
            with pytest.raises(InvalidNameError):
                call()

    def test_of_racing_creators_exactly_one_wins_each_round(
        self, store: Store, other: Store
    ) -> None:
        """I2, I3: two decisions for one slot are impossible."""
        stores = [store, other] * (_RACERS // 2)
        barrier = threading.Barrier(_RACERS)
        won: list[tuple[int, bytes]] = []

        def race(number: int) -> None:
            for at in range(_ROUNDS):
                barrier.wait()
                try:
                    stores[number].create(f"log/{at}", b"writer %d" % number)
                except ExistsError:
                    continue
                won.append((at, b"writer %d" % number))

        threads = [threading.Thread(target=race, args=(n,)) for n in range(_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(at for at, _ in won) == list(range(_ROUNDS))
        for at, data in won:
            assert store.get(f"log/{at}") == other.get(f"log/{at}") == data

    # Data objects

    @pytest.mark.parametrize("may_link", [True, False])
    @pytest.mark.parametrize("size", [0, 1, 4096, 3_000_001])
    def test_stored_bytes_are_verified_and_read(
        self, store: Store, other: Store, tmp_path: Path, size: int, may_link: bool
    ) -> None:
        """I1: what a vote says is in the store is there."""
        data = os.urandom(size)
        source = digested(_write(tmp_path / "spool" / "f", data), may_link=may_link)
        store.put("a/data/1", source)
        for client in (store, other):
            for mode in client.verify_modes:
                client.verify("a/data/1", source, mode)
            assert client.read("a/data/1", 0, size + 10) == data
            assert client.read("a/data/1", size // 2, 7) == data[size // 2 : size // 2 + 7]
            assert client.read("a/data/1", size + 5, 7) == b""
        assert store.children("a/data") == ["1"]

    def test_a_put_may_be_repeated_and_replaces_a_failed_try(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        first = digested(_write(tmp_path / "spool" / "f", b"first"))
        store.put("d/1", first)
        second = digested(_write(tmp_path / "spool" / "g", b"second, longer"), may_link=True)
        for _ in range(3):
            store.put("d/1", second)
        assert other.read("d/1", 0, 100) == b"second, longer"
        other.verify("d/1", second, VerifyMode.READBACK)
        assert store.children("d") == ["1"]

    @pytest.mark.parametrize("may_link", [True, False])
    @pytest.mark.parametrize("mode", VerifyMode)
    def test_of_many_files_each_is_stored_or_has_its_error(
        self, store: Store, other: Store, tmp_path: Path, mode: VerifyMode, may_link: bool
    ) -> None:
        """I1: what is not in the result is there; one that fails stops no other."""
        if mode not in store.verify_modes:
            with pytest.raises(UsageError, match=mode.value):
                store.put_all({}, mode)
            return
        files = {
            f"{parent}/{n}": digested(
                _write(tmp_path / "spool" / f"{parent}{n}", b"%d" % n), may_link=may_link
            )
            for parent in ("d", "e")
            for n in range(3)
        }
        store.put("d/2", digested(_write(tmp_path / "spool" / "old", b"a failed try")))
        _write(tmp_path / "spool" / "d1", b"another size")
        for _ in range(2):
            failed = store.put_all(files, mode)
            assert list(failed) == ["d/1"]
            assert isinstance(failed["d/1"], IntegrityError)
        for key, source in files.items():
            if key != "d/1":
                other.verify(key, source, VerifyMode.READBACK)
        assert (store.children("d"), store.children("e")) == (["0", "2"], ["0", "1", "2"])

    def test_a_source_of_another_size_is_refused_and_nothing_is_left(
        self, store: Store, tmp_path: Path
    ) -> None:
        path = _write(tmp_path / "spool" / "f", b"12345")
        source = digested(path)
        _write(tmp_path / "spool" / "f", b"1234")
        with pytest.raises(IntegrityError, match="said to have 5"):
            store.put("d/1", source)
        with pytest.raises(MissingError):
            store.read("d/1", 0, 1)
        assert store.children("d") == []

    def test_verify_names_the_key_whose_bytes_differ(self, store: Store, tmp_path: Path) -> None:
        """I1: other bytes of the same size are found by reading back."""
        store.put("d/1", digested(_write(tmp_path / "spool" / "f", b"aaaa")))
        same_size = digested(_write(tmp_path / "spool" / "g", b"aaab"))
        if VerifyMode.SIZE in store.verify_modes:
            store.verify("d/1", same_size, VerifyMode.SIZE)
        with pytest.raises(IntegrityError, match="chunk 0 of 'd/1'"):
            store.verify("d/1", same_size, VerifyMode.READBACK)
        longer = digested(_write(tmp_path / "spool" / "h", b"aaaaa"))
        for mode in store.verify_modes:
            with pytest.raises(IntegrityError) as raised:
                store.verify("d/1", longer, mode)
            assert raised.value.subject == "d/1"
            with pytest.raises(MissingError):
                store.verify("d/2", longer, mode)

    def test_a_missing_source_is_missing(self, store: Store, tmp_path: Path) -> None:
        source = digested(_write(tmp_path / "spool" / "f", b"x"))
        os.unlink(source.path)
        with pytest.raises(MissingError):
            store.put("d/1", source)

    # Publication

    def _checkpoint(
        self, store: Store, tmp_path: Path, attempt: str = "step-1.0", **files: bytes
    ) -> tuple[Manifest, bytes]:
        spool = tmp_path / "spool"
        spool.mkdir(exist_ok=True)
        name = attempt.rpartition(".")[0]
        contents = files or {"model.pt": b"weights of " + attempt.encode()}
        return store_checkpoint(store, _RUN, attempt, name, str(spool), contents)

    def test_a_published_checkpoint_shows_exactly_its_manifest(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        spool = tmp_path / "spool"
        local = _write(spool / "f", b"bytes")
        entries = [
            store_file(store, _RUN, "step-1.0", "sub/a.bin", local, mode=0o640, file=1),
            store_file(store, _RUN, "step-1.0", "b\\c.bin", local, mode=0o600, file=2),
            FileEntry(path="sub", type=EntryType.DIR, mode=0o750, mtime_ns=MTIME_NS + 5),
            FileEntry(path="empty", type=EntryType.DIR, mode=0o700, mtime_ns=MTIME_NS + 6),
            FileEntry(
                path="sub/l", type=EntryType.SYMLINK, mode=0o777, mtime_ns=MTIME_NS, target="a.bin"
            ),
        ]
        manifest = manifest_of(_RUN, "step-1", "step-1.0", entries)
        data = encode(manifest)
        assert store.published_attempt(_RUN, "step-1") == ""
        store.publish(_RUN, manifest, data)
        assert other.published_attempt(_RUN, "step-1") == "step-1.0"
        assert _tree(other, f"{_RUN}/step-1") == {
            "sub": "/",
            "empty": "/",
            "sub/a.bin": b"bytes",
            "b\\c.bin": b"bytes",
            "sub/l": "-> a.bin",
        }
        assert other.get(f"{_RUN}/step-1/.ckptgate/manifest.json") == data
        assert other.get(full_key(_RUN, entries[0].key)) == b"bytes"
        shown = {entry.path: other.plain_stat(f"{_RUN}/step-1/{entry.path}") for entry in entries}
        for entry in entries:
            if entry.type is not EntryType.SYMLINK:
                found = shown[entry.path]
                assert (found.mode, found.mtime_ns) == (entry.mode, entry.mtime_ns), entry.path

    def test_publishing_again_changes_nothing(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I10: every step may be repeated."""
        manifest, data = self._checkpoint(store, tmp_path)
        for client in (store, other, store):
            client.publish(_RUN, manifest, data)
            assert _tree(client, f"{_RUN}/step-1") == {"model.pt": b"weights of step-1.0"}
        assert store.children(attempt_prefix(_RUN, "step-1.0")) == ["data"]

    def test_a_newer_attempt_replaces_an_older_one_whose_bytes_stay(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I9: nothing that is reachable from a COMMIT is deleted."""
        old, old_data = self._checkpoint(store, tmp_path, "step-1.0", x=b"old", gone=b"1")
        new, new_data = self._checkpoint(store, tmp_path, "step-1.1", x=b"new")
        store.publish(_RUN, old, old_data)
        other.publish(_RUN, new, new_data)
        assert store.published_attempt(_RUN, "step-1") == "step-1.1"
        assert _tree(store, f"{_RUN}/step-1") == {"x": b"new"}
        for entry in old.entries:
            assert store.read(full_key(_RUN, entry.key), 0, 10) in {b"old", b"1"}

    def test_a_foreign_directory_is_displaced_never_deleted(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        local = _write(tmp_path / "spool" / "f", b"precious")
        store.plain_put(f"{_RUN}/step-1/theirs.bin", local, mode=0o644, mtime_ns=MTIME_NS)
        manifest, data = self._checkpoint(store, tmp_path)
        other.publish(_RUN, manifest, data)
        assert _tree(store, f"{_RUN}/step-1") == {"model.pt": b"weights of step-1.0"}
        (moved,) = store.children(f"{_RUN}/.ckptgate/displaced")
        assert moved.startswith("step-1-")
        assert store.get(f"{_RUN}/.ckptgate/displaced/{moved}/theirs.bin") == b"precious"

    def test_an_empty_directory_or_a_file_in_its_place_is_no_obstacle(
        self, store: Store, tmp_path: Path
    ) -> None:
        store.plain_mkdir(f"{_RUN}/step-1", 0o755)
        local = _write(tmp_path / "spool" / "f", b"a file")
        store.plain_put(f"{_RUN}/step-2", local, mode=0o644, mtime_ns=MTIME_NS)
        store.plain_symlink(f"{_RUN}/step-3", "step-1")
        for number in (1, 2, 3):
            manifest, data = self._checkpoint(store, tmp_path, f"step-{number}.0", m=b"x")
            store.publish(_RUN, manifest, data)
            assert _tree(store, f"{_RUN}/step-{number}") == {"m": b"x"}

    def test_racing_publishers_of_one_manifest_leave_one_whole_tree(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I8, I10: any survivor finishes, and a reader sees one attempt."""
        old, old_data = self._checkpoint(store, tmp_path, "step-1.0", a=b"0", b=b"0")
        store.publish(_RUN, old, old_data)
        manifest, data = self._checkpoint(store, tmp_path, "step-1.1", a=b"1", b=b"1")
        errors: list[BaseException] = []

        def publish(client: Store) -> None:
            try:
                client.publish(_RUN, manifest, data)
            except CkptError as exc:
                errors.append(exc)

        threads = [threading.Thread(target=publish, args=(c,)) for c in (store, other) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        store.publish(_RUN, manifest, data)
        assert _tree(other, f"{_RUN}/step-1") == {"a": b"1", "b": b"1"}
        assert store.children(attempt_prefix(_RUN, "step-1.1")) == ["data"]

    def test_bytes_that_are_not_in_the_store_are_named(self, store: Store, tmp_path: Path) -> None:
        manifest, _ = self._checkpoint(store, tmp_path)
        lost = FileEntry(
            path="lost.pt",
            type=EntryType.FILE,
            mode=0o644,
            mtime_ns=0,
            size=4,
            digest="0" * 64,
            key=".ckptgate/attempts/step-1.0/data/node-a-0123abcd/77",
        )
        broken = manifest_of(_RUN, "step-1", "step-1.0", (*manifest.entries, lost))
        with pytest.raises(MissingError, match="/77"):
            store.publish(_RUN, broken, encode(broken))
        assert store.published_attempt(_RUN, "step-1") == ""
        with pytest.raises(MissingError):
            store.plain_stat(f"{_RUN}/step-1")

    def test_what_differs_in_a_published_directory_is_named(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I13: by whoever changed it, since people without ckptgate read just that directory."""
        spool = tmp_path / "spool"
        spool.mkdir()
        names = ["a", "b", "c", "d", "sub/e", "gone/f", "imp/g"]
        files = dict.fromkeys(names, b"0123456789")
        manifest, _ = store_checkpoint(store, _RUN, "step-1.0", "step-1", str(spool), files)
        link = FileEntry(path="l", type=EntryType.SYMLINK, mode=0o777, mtime_ns=0, target="a")
        empty = FileEntry(path="empty", type=EntryType.DIR, mode=0o755, mtime_ns=0)
        manifest = manifest_of(_RUN, "step-1", "step-1.0", (*manifest.entries, link, empty))
        data = encode(manifest)
        (problem,) = store.published_problems(_RUN, manifest, data)
        assert problem == "step-1: the published directory is not there"
        store.publish(_RUN, manifest, data)
        assert store.published_problems(_RUN, manifest, data) == []
        assert other.published_problems(_RUN, manifest, data) == []
        place = f"{_RUN}/step-1"
        for name, content in (("a", b"0123X56789"), ("b", b"0123"), ("new", b"")):
            local = _write(tmp_path / "spool" / "changed", content)
            other.plain_put(f"{place}/{name}", local, mode=0o644, mtime_ns=MTIME_NS)
        for name in ("c", "d", "gone/f"):
            other.plain_remove(f"{place}/{name}", is_dir=False)
        other.plain_symlink(f"{place}/d", "a")
        other.plain_symlink(f"{place}/l", "b")
        for name in ("gone", "empty"):
            other.plain_remove(f"{place}/{name}", is_dir=True)
        other.plain_mkdir(f"{place}/extra/below", 0o755)
        seen = dict(line.split(": ", 1) for line in store.published_problems(_RUN, manifest, data))
        assert seen.pop("step-1/a").startswith("published bytes have digest")
        assert seen == {
            "step-1/b": "published with 4 bytes, committed with 10",
            "step-1/c": "missing in the published directory",
            "step-1/d": "published as a symlink, committed as a file",
            "step-1/l": "published with target 'b', not 'a'",
            "step-1/gone": "missing in the published directory",
            "step-1/empty": "missing in the published directory",
            "step-1/new": "published, but not in the manifest",
            "step-1/extra": "published, but not in the manifest",
        }
        changed = encode(manifest_of(_RUN, "step-1", "step-1.0", manifest.entries[1:]))
        assert len(store.published_problems(_RUN, manifest, changed)) == len(seen) + 2

    def test_unpublishing_hides_only_the_attempt_that_is_shown(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        manifest, data = self._checkpoint(store, tmp_path)
        store.publish(_RUN, manifest, data)
        store.unpublish(_RUN, "step-1", "step-1.9")
        assert other.published_attempt(_RUN, "step-1") == "step-1.0"
        for _ in range(2):
            store.unpublish(_RUN, "step-1", "step-1.0")
            assert other.published_attempt(_RUN, "step-1") == ""
            with pytest.raises(MissingError):
                other.plain_stat(f"{_RUN}/step-1")
        assert other.read(full_key(_RUN, manifest.entries[0].key), 0, 7) == b"weights"
        store.publish(_RUN, manifest, data)
        assert other.published_attempt(_RUN, "step-1") == "step-1.0"

    def test_the_roots_own_run_is_published_too(self, store: Store, tmp_path: Path) -> None:
        spool = tmp_path / "spool"
        spool.mkdir()
        manifest, data = store_checkpoint(store, "", "s.0", "s", str(spool), {"m": b"x"})
        store.publish("", manifest, data)
        assert store.published_attempt("", "s") == "s.0"
        assert store.plain_read("s/m", 0, 2) == b"x"

    # Pointers

    def test_pointers_are_replaced_and_keep_their_kind(self, store: Store, other: Store) -> None:
        assert other.pointer_content(_RUN, "latest") is None
        values = (
            PointerValue(
                pointer="latest", kind=PointerKind.SYMLINK, target="step-1", content="step-1"
            ),
            PointerValue(
                pointer="latest", kind=PointerKind.SYMLINK, target="step-2", content="./step-2"
            ),
            PointerValue(
                pointer="latest", kind=PointerKind.TEXT, target="step-3", content="step-3\n"
            ),
            PointerValue(
                pointer="latest", kind=PointerKind.SYMLINK, target="step-3", content="step-3"
            ),
        )
        for value in values:
            for _ in range(2):
                store.set_pointer(_RUN, value)
                assert other.pointer_content(_RUN, "latest") == value.content
            kind = other.plain_stat(f"{_RUN}/latest").kind
            assert (kind is PlainKind.SYMLINK) == (value.kind is PointerKind.SYMLINK)
        for _ in range(2):
            store.remove_pointer(_RUN, "latest")
            assert other.pointer_content(_RUN, "latest") is None
        assert [entry.name for entry in store.plain_list(_RUN)] == []

    def test_one_holder_of_a_runs_lock_at_a_time(self, store: Store, other: Store) -> None:
        inside: list[int] = []
        most: list[int] = []

        def hold(client: Store) -> None:
            for _ in range(5):
                with client.lock_run(_RUN):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()

        threads = [threading.Thread(target=hold, args=(c,)) for c in (store, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(most) == 1
        with store.lock_run("another/run"), other.lock_run(_RUN):
            pass

    # Plain names

    def test_plain_files_are_replaced_whole(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        for data in (b"one", b"two, longer", b""):
            local = _write(tmp_path / "spool" / "f", data)
            store.plain_put("logs/a.log", local, mode=0o640, mtime_ns=MTIME_NS)
            entry = other.plain_stat("logs/a.log")
            assert (entry.name, entry.kind, entry.size) == ("a.log", PlainKind.FILE, len(data))
            assert (entry.mode, entry.mtime_ns) == (0o640, MTIME_NS)
            assert other.plain_read("logs/a.log", 0, 100) == data
        assert [e.name for e in store.plain_list("logs")] == ["a.log"]

    def test_plain_directories_symlinks_and_removal(self, store: Store, other: Store) -> None:
        for _ in range(2):
            store.plain_mkdir("a/b", 0o750)
            store.plain_symlink("a/l", "b")
        store.plain_symlink("a/l", "c")
        kinds = {entry.name: entry for entry in other.plain_list("a")}
        assert kinds["b"].kind is PlainKind.DIR
        assert kinds["b"].mode == 0o750
        assert (kinds["l"].kind, kinds["l"].target) == (PlainKind.SYMLINK, "c")
        with pytest.raises(ExistsError):
            store.plain_mkdir("a/l", 0o755)
        with pytest.raises(ExistsError):
            store.plain_remove("a", is_dir=True)
        for _ in range(2):
            store.plain_remove("a/l", is_dir=False)
            store.plain_remove("a/b", is_dir=True)
        assert other.plain_list("a") == []
        with pytest.raises(MissingError):
            other.plain_stat("a/b")
        with pytest.raises(MissingError):
            other.plain_list("a/b")

    def test_a_plain_rename_may_be_repeated(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        local = _write(tmp_path / "spool" / "f", b"data")
        store.plain_put("a/x", local, mode=0o644, mtime_ns=MTIME_NS)
        for _ in range(2):
            store.plain_rename("a/x", "b/y")
            assert other.plain_read("b/y", 0, 10) == b"data"
            with pytest.raises(MissingError):
                other.plain_stat("a/x")
        store.plain_rename("b", "c")
        assert other.plain_read("c/y", 0, 10) == b"data"
        with pytest.raises(MissingError):
            store.plain_rename("a/x", "a/z")

    def test_the_gateways_own_names_are_no_plain_names(self, store: Store, tmp_path: Path) -> None:
        manifest, data = self._checkpoint(store, tmp_path)
        store.publish(_RUN, manifest, data)
        store.plain_mkdir("plain", 0o755)
        shown = {entry.name: entry for entry in store.plain_list(_RUN)}
        assert list(shown) == ["step-1"]
        assert shown["step-1"].is_managed
        assert not shown["step-1"].has_runs
        assert store.plain_stat(_RUN).has_runs
        assert not store.plain_stat("plain").has_runs
        assert isinstance(store.plain_stat(""), PlainEntry)
        refused: tuple[Any, ...] = (
            lambda: store.plain_list(f"{_RUN}/.ckptgate"),
            lambda: store.plain_stat(f"{_RUN}/.ckptgate/log"),
            lambda: store.plain_remove(f"{_RUN}/.ckptgate", is_dir=True),
            lambda: store.plain_rename(f"{_RUN}/.ckptgate", "x"),
        )
        for call in refused:
            with pytest.raises(RefusedError):
                call()
