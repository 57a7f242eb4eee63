"""What a store owes to publication, as tests; `StoreContract` includes them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptgate.errors import CkptError, MissingError
from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    PointerKind,
    PointerValue,
    encode,
)
from ckptgate.model.layout import attempt_prefix, full_key, join_key
from ckptgate.ports.store import PlainKind, Store
from ckptgate.testing.samples import (
    MTIME_NS,
    manifest_of,
    named_tree,
    plain_tree,
    sample_checkpoint,
    store_checkpoint,
    store_file,
    write_file,
)

__all__ = ["PublicationContract"]

_RUN = "exp/run-7"


class PublicationContract:
    """`ports.store.Publication`. The fixtures *store* and *other* are the subclass's.

    Attributes:
        shows_files: each file is under its plain name, too; else the published manifest alone says
            where the bytes are, and the published directory has no plain names.
        keeps_directory_modes: the store keeps a directory's mode and time.
        odd_name: a legal name of a file that not every store keeps as it is.
    """

    shows_files = True
    keeps_directory_modes = True
    odd_name = "b\\c.bin"

    def shown(self, store: Store, run: str, name: str) -> dict[str, bytes | str]:
        """What somebody finds who looks at the published checkpoint."""
        place = join_key(run, name)
        if self.shows_files:
            return plain_tree(store, place)
        assert store.plain_list(place) == []
        return named_tree(store, run, name)

    def test_a_published_checkpoint_shows_exactly_its_manifest(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        spool = tmp_path / "spool"
        local = write_file(spool / "f", b"bytes")
        entries = [
            store_file(store, _RUN, "step-1.0", "sub/a.bin", local, mode=0o640, file=1),
            store_file(store, _RUN, "step-1.0", self.odd_name, local, mode=0o600, file=2),
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
        assert self.shown(other, _RUN, "step-1") == {
            "sub": "/",
            "empty": "/",
            "sub/a.bin": b"bytes",
            self.odd_name: b"bytes",
            "sub/l": "-> a.bin",
        }
        assert other.get(f"{_RUN}/step-1/.ckptgate/manifest.json") == data
        assert other.get(full_key(_RUN, entries[0].key)) == b"bytes"
        for entry in entries if self.shows_files else ():
            if entry.type is EntryType.FILE or self.keeps_directory_modes:
                found = other.plain_stat(f"{_RUN}/step-1/{entry.path}")
                wanted = (entry.mode, entry.mtime_ns)
                is_link = entry.type is EntryType.SYMLINK
                assert is_link or (found.mode, found.mtime_ns) == wanted, entry.path

    def test_publishing_again_changes_nothing(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I10: every step may be repeated."""
        manifest, data = sample_checkpoint(store, tmp_path, _RUN)
        for client in (store, other, store):
            client.publish(_RUN, manifest, data)
            assert self.shown(client, _RUN, "step-1") == {"model.pt": b"weights of step-1.0"}
        assert store.children(attempt_prefix(_RUN, "step-1.0")) == ["data"]

    def test_a_newer_attempt_replaces_an_older_one_whose_bytes_stay(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I9: nothing that is reachable from a COMMIT is deleted."""
        old, old_data = sample_checkpoint(store, tmp_path, _RUN, "step-1.0", x=b"old", gone=b"1")
        new, new_data = sample_checkpoint(store, tmp_path, _RUN, "step-1.1", x=b"new")
        store.publish(_RUN, old, old_data)
        other.publish(_RUN, new, new_data)
        assert store.published_attempt(_RUN, "step-1") == "step-1.1"
        assert self.shown(store, _RUN, "step-1") == {"x": b"new"}
        for entry in old.entries:
            assert store.read(full_key(_RUN, entry.key), 0, 10) in {b"old", b"1"}

    def test_a_foreign_directory_is_displaced_never_deleted(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        local = write_file(tmp_path / "spool" / "f", b"precious")
        store.plain_put(f"{_RUN}/step-1/theirs.bin", local, mode=0o644, mtime_ns=MTIME_NS)
        manifest, data = sample_checkpoint(store, tmp_path, _RUN)
        other.publish(_RUN, manifest, data)
        assert self.shown(store, _RUN, "step-1") == {"model.pt": b"weights of step-1.0"}
        (moved,) = store.children(f"{_RUN}/.ckptgate/displaced")
        assert moved.startswith("step-1-")
        assert store.get(f"{_RUN}/.ckptgate/displaced/{moved}/theirs.bin") == b"precious"

    def test_an_empty_directory_or_a_file_in_its_place_is_no_obstacle(
        self, store: Store, tmp_path: Path
    ) -> None:
        store.plain_mkdir(f"{_RUN}/step-1", 0o755)
        local = write_file(tmp_path / "spool" / "f", b"a file")
        store.plain_put(f"{_RUN}/step-2", local, mode=0o644, mtime_ns=MTIME_NS)
        store.plain_symlink(f"{_RUN}/step-3", "step-1")
        for number in (1, 2, 3):
            manifest, data = sample_checkpoint(store, tmp_path, _RUN, f"step-{number}.0", m=b"x")
            store.publish(_RUN, manifest, data)
            assert self.shown(store, _RUN, f"step-{number}") == {"m": b"x"}

    def test_racing_publishers_of_one_manifest_leave_one_whole_tree(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I8, I10: any survivor finishes, and a reader sees one attempt."""
        old, old_data = sample_checkpoint(store, tmp_path, _RUN, "step-1.0", a=b"0", b=b"0")
        store.publish(_RUN, old, old_data)
        manifest, data = sample_checkpoint(store, tmp_path, _RUN, "step-1.1", a=b"1", b=b"1")
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
        assert self.shown(other, _RUN, "step-1") == {"a": b"1", "b": b"1"}
        assert store.children(attempt_prefix(_RUN, "step-1.1")) == ["data"]

    def test_a_publisher_that_is_no_longer_due_changes_nothing(
        self, store: Store, tmp_path: Path
    ) -> None:
        old, old_data = sample_checkpoint(store, tmp_path, _RUN, "step-1.0", m=b"old")
        new, new_data = sample_checkpoint(store, tmp_path, _RUN, "step-1.1", m=b"new")
        store.publish(_RUN, new, new_data, is_due=lambda: False)
        assert store.published_attempt(_RUN, "step-1") == ""
        store.publish(_RUN, old, old_data)
        store.publish(_RUN, new, new_data, is_due=lambda: False)
        assert self.shown(store, _RUN, "step-1") == {"m": b"old"}

    def test_a_slow_publisher_does_not_replace_what_is_newer_than_its_answer(
        self, store: Store, other: Store, tmp_path: Path
    ) -> None:
        """I8: it asked, slept, and meanwhile another attempt was committed and published."""
        attempts = [
            sample_checkpoint(store, tmp_path, _RUN, f"step-1.{n}", m=b"%d" % n) for n in range(3)
        ]
        asked: list[bool] = []

        def is_due() -> bool:
            if not asked:
                other.publish(_RUN, *attempts[2])
            asked.append(not asked)
            return asked[-1]

        store.publish(_RUN, *attempts[0])
        store.publish(_RUN, *attempts[1], is_due=is_due)
        assert len(asked) > 1
        assert store.published_attempt(_RUN, "step-1") == "step-1.2"
        assert self.shown(other, _RUN, "step-1") == {"m": b"2"}

    def test_bytes_that_are_not_in_the_store_are_named(self, store: Store, tmp_path: Path) -> None:
        manifest, _ = sample_checkpoint(store, tmp_path, _RUN)
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
            local = write_file(tmp_path / "spool" / "changed", content)
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
        manifest, data = sample_checkpoint(store, tmp_path, _RUN)
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
        assert self.shown(store, "", "s") == {"m": b"x"}

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
