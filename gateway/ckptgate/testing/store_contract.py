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
    ExistsError,
    FormatVersionError,
    IntegrityError,
    InvalidNameError,
    MissingError,
    RefusedError,
    UsageError,
)
from ckptgate.ports.store import PlainEntry, PlainKind, Store, VerifyMode
from ckptgate.testing.publication_contract import PublicationContract
from ckptgate.testing.reclaim_contract import ReclaimContract
from ckptgate.testing.samples import MTIME_NS, digested, has_records, sample_checkpoint, write_file

__all__ = ["StoreContract"]

_RUN = "exp/run-7"
_RACERS = 4


class StoreContract(PublicationContract, ReclaimContract):
    """What every store must keep. What it may do besides, the subclass says by its attributes.

    Attributes:
        race_rounds: so often creators race; fewer where a store takes seconds for each.
    """

    race_rounds = 20

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
        assert store.children("") == [] or not self.forgets_directories
        assert not has_records(store, "")
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
        source = digested(write_file(tmp_path / "spool" / "f", b"x"))
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
            for at in range(self.race_rounds):
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
        assert sorted(at for at, _ in won) == list(range(self.race_rounds))
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
        source = digested(write_file(tmp_path / "spool" / "f", data), may_link=may_link)
        store.put("a/data/1", source)
        for client in (store, other):
            for mode in client.verify_modes:
                client.verify("a/data/1", source, mode)
            assert client.read("a/data/1", 0, size + 10) == data
            assert client.read("a/data/1", size // 2, 7) == data[size // 2 : size // 2 + 7]
            assert client.read("a/data/1", size + 5, 7) == b""
            for offset, length in ((0, size + 10), (size // 2, size // 2 // 2), (size + 5, 7)):
                view = memoryview(bytearray(length))
                found = client.read_into("a/data/1", offset, view)
                assert bytes(view[:found]) == data[offset : offset + length]
        assert store.children("a/data") == ["1"]

    def test_a_put_may_be_repeated_and_replaces_a_failed_try(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        first = digested(write_file(tmp_path / "spool" / "f", b"first"))
        store.put("d/1", first)
        second = digested(write_file(tmp_path / "spool" / "g", b"second, longer"), may_link=True)
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
                write_file(tmp_path / "spool" / f"{parent}{n}", b"%d" % n), may_link=may_link
            )
            for parent in ("d", "e")
            for n in range(3)
        }
        store.put("d/2", digested(write_file(tmp_path / "spool" / "old", b"a failed try")))
        write_file(tmp_path / "spool" / "d1", b"another size")
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
        path = write_file(tmp_path / "spool" / "f", b"12345")
        source = digested(path)
        write_file(tmp_path / "spool" / "f", b"1234")
        with pytest.raises(IntegrityError, match="said to have 5"):
            store.put("d/1", source)
        with pytest.raises(MissingError):
            store.read("d/1", 0, 1)
        assert store.children("d") == []

    def test_verify_names_the_key_whose_bytes_differ(self, store: Store, tmp_path: Path) -> None:
        """I1: other bytes of the same size are found by reading back."""
        store.put("d/1", digested(write_file(tmp_path / "spool" / "f", b"aaaa")))
        same_size = digested(write_file(tmp_path / "spool" / "g", b"aaab"))
        if VerifyMode.SIZE in store.verify_modes:
            store.verify("d/1", same_size, VerifyMode.SIZE)
        with pytest.raises(IntegrityError, match="chunk 0 of 'd/1'"):
            store.verify("d/1", same_size, VerifyMode.READBACK)
        longer = digested(write_file(tmp_path / "spool" / "h", b"aaaaa"))
        for mode in store.verify_modes:
            with pytest.raises(IntegrityError) as raised:
                store.verify("d/1", longer, mode)
            assert raised.value.subject == "d/1"
            with pytest.raises(MissingError):
                store.verify("d/2", longer, mode)

    def test_a_missing_source_is_missing(self, store: Store, tmp_path: Path) -> None:
        source = digested(write_file(tmp_path / "spool" / "f", b"x"))
        os.unlink(source.path)
        with pytest.raises(MissingError):
            store.put("d/1", source)

    # Plain names

    def test_plain_files_are_replaced_whole(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        for data in (b"one", b"two, longer", b""):
            local = write_file(tmp_path / "spool" / "f", data)
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
        assert kinds["b"].mode == (0o750 if self.keeps_directory_modes else 0o755)
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
        local = write_file(tmp_path / "spool" / "f", b"data")
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
        manifest, data = sample_checkpoint(store, tmp_path, _RUN)
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
