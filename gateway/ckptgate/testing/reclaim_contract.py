"""What a store owes to reclaiming, as tests; `StoreContract` includes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptgate.errors import InvalidNameError, MissingError, RefusedError
from ckptgate.model.layout import attempt_prefix, full_key, intent_key, member_key, vote_key
from ckptgate.model.reclaim import Part, PartKind
from ckptgate.ports.store import Store
from ckptgate.testing.samples import has_records, named_tree, store_checkpoint, write_file

__all__ = ["ReclaimContract"]

_RUN = "exp/run-7"
_MEMBER = "node-0000000a"
_FILES = {"a.bin": b"1" * 5000, "sub/b.txt": b"2"}


def _publish(store: Store, tmp_path: Path, attempt: str) -> None:
    manifest, data = store_checkpoint(store, _RUN, attempt, "step-1", str(tmp_path), dict(_FILES))
    store.publish(_RUN, manifest, data)


def _kinds(store: Store, attempt: str) -> set[PartKind]:
    return {part.kind for part in store.attempt_parts(_RUN, attempt)}


class ReclaimContract:
    """`ports.store.Reclamation`. The fixture *store* is the subclass's.

    Attributes:
        keeps_trees: a published directory that is replaced or hidden is kept until it is reclaimed.
        forgets_directories: a directory is no longer listed once nothing is in it.
    """

    keeps_trees = True
    forgets_directories = True

    def test_an_attempt_that_is_not_there_has_no_parts(self, store: Store) -> None:
        assert store.attempt_parts(_RUN, "step-1.0") == []
        store.tidy(_RUN, "step-1.0")

    def test_everything_of_an_attempt_is_listed_but_its_intent(
        self, store: Store, tmp_path: Path
    ) -> None:
        _publish(store, tmp_path, "step-1.0")
        store.create(intent_key(_RUN, "step-1.0"), b"intent")
        store.create(member_key(_RUN, "step-1.0", _MEMBER), b"member")
        store.create(vote_key(_RUN, "step-1.0", _MEMBER, 0), b"vote")
        store.create(f"{attempt_prefix(_RUN, 'step-1.0')}/chunks/{'0a' * 32}", b"c" * 32)
        store.create(f"{attempt_prefix(_RUN, 'step-1.0')}/names/{_MEMBER}/0.json", b"op")
        store.unpublish(_RUN, "step-1", "step-1.0")
        wanted = set(PartKind) - {PartKind.UNFINISHED, PartKind.MANIFEST}
        if not self.keeps_trees:
            wanted.remove(PartKind.TREE)
        assert _kinds(store, "step-1.0") >= wanted
        assert not any("intent" in part.key for part in store.attempt_parts(_RUN, "step-1.0"))

    def test_what_is_reclaimed_is_gone_and_the_rest_stays(
        self, store: Store, tmp_path: Path
    ) -> None:
        _publish(store, tmp_path, "step-1.0")
        store.create(intent_key(_RUN, "step-1.0"), b"intent")
        _publish(store, tmp_path, "step-1.1")
        kept = {part.key for part in store.attempt_parts(_RUN, "step-1.1")}
        for part in store.attempt_parts(_RUN, "step-1.0"):
            assert store.reclaim(_RUN, part) >= 0
            assert store.reclaim(_RUN, part) == 0
            with pytest.raises(MissingError):
                store.get(full_key(_RUN, part.key))
        store.tidy(_RUN, "step-1.0")
        assert store.attempt_parts(_RUN, "step-1.0") == []
        prefix = attempt_prefix(_RUN, "step-1.0")
        left = store.children(prefix)
        if not self.forgets_directories:
            left = [name for name in left if has_records(store, f"{prefix}/{name}")]
        assert left == ["intent.json"]
        assert {part.key for part in store.attempt_parts(_RUN, "step-1.1")} == kept
        assert store.published_attempt(_RUN, "step-1") == "step-1.1"
        assert named_tree(store, _RUN, "step-1") == _FILES

    def test_many_parts_go_together(self, store: Store, tmp_path: Path) -> None:
        _publish(store, tmp_path, "step-1.0")
        _publish(store, tmp_path, "step-1.1")
        store.create(vote_key(_RUN, "step-1.0", _MEMBER, 0), b"vote")
        parts = store.attempt_parts(_RUN, "step-1.0")
        for _ in range(2):
            won = store.reclaim_all(_RUN, parts)
            assert not won.refused
        assert store.attempt_parts(_RUN, "step-1.0") == []
        assert store.reclaim_all(_RUN, []).size == 0
        assert named_tree(store, _RUN, "step-1") == _FILES

    def test_only_what_is_the_gateways_is_removed(self, store: Store, tmp_path: Path) -> None:
        """I9: a plan that was made elsewhere, or edited, removes nothing else."""
        local = write_file(tmp_path / "spool" / "f", b"precious")
        store.plain_put(f"{_RUN}/theirs", local, mode=0o644, mtime_ns=0)
        own = ".ckptgate/attempts/step-1.0"
        for key, kind in (
            ("theirs", PartKind.DATA),
            ("theirs", PartKind.UNFINISHED),
            (".ckptgate/log/0000000000.json", PartKind.MANIFEST),
            (f"{own}/../../../theirs", PartKind.DATA),
        ):
            part = Part(key=key, kind=kind, size=1)
            with pytest.raises((RefusedError, InvalidNameError)):
                store.reclaim(_RUN, part)
        assert store.plain_read(f"{_RUN}/theirs", 0, 99) == b"precious"

    def test_the_bytes_that_go_are_counted_once(self, store: Store, tmp_path: Path) -> None:
        """Also where a published directory shares them with the data."""
        _publish(store, tmp_path, "step-1.0")
        store.unpublish(_RUN, "step-1", "step-1.0")
        parts = sorted(
            store.attempt_parts(_RUN, "step-1.0"), key=lambda part: part.kind is not PartKind.TREE
        )
        won = sum(store.reclaim(_RUN, part) for part in parts)
        assert sum(map(len, _FILES.values())) <= won

    def test_a_store_without_unfinished_writes_lists_none(self, store: Store) -> None:
        store.plain_mkdir("exp", 0o755)
        assert store.unfinished("exp") == []
        assert store.unfinished("nowhere") == []
        assert store.unfinished("") == []
