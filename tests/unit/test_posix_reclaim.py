"""Reclaiming where others have been at work: only own names go, no link is followed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from ckptgate.errors import RefusedError
from ckptgate.model.reclaim import Part, PartKind
from ckptgate.testing.samples import store_checkpoint
from ckptgate_adapters.posix_store import PosixStore, syscalls

RUN = "run"
MEMBER = "node-0000000a"
TEMP = ".tmp-ckptgate-0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    (tmp_path / "store").mkdir()
    return PosixStore(str(tmp_path / "store"))


@pytest.fixture
def attempt(store: PosixStore, tmp_path: Path) -> Path:
    """A published and retired attempt's directory."""
    manifest, data = store_checkpoint(
        store, RUN, "step-1.0", "step-1", str(tmp_path), {"w.bin": b"w" * 5000}
    )
    store.publish(RUN, manifest, data)
    store.unpublish(RUN, "step-1", "step-1.0")
    return tmp_path / "store" / RUN / ".ckptgate/attempts/step-1.0"


def reclaim_all(store: PosixStore) -> int:
    won = sum(
        store.reclaim(RUN, part)
        for part in sorted(store.attempt_parts(RUN, "step-1.0"), key=lambda part: part.key)
    )
    store.tidy(RUN, "step-1.0")
    return won


def test_what_is_not_the_gateway_s_own_is_neither_listed_nor_removed(
    store: PosixStore, attempt: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "1").write_bytes(b"precious")
    data = next((attempt / "data").iterdir())
    foreign = [
        attempt / "notes.txt",
        attempt / "replaced-12345678.bak",
        attempt / "data/README",
        data / "seven",
        data / "8.json",
        attempt / "manifest-1.json",
    ]
    for path in foreign:
        path.write_bytes(b"mine")
    lookalike = attempt / "retired-0badcafe"
    lookalike.mkdir()
    (lookalike / "keep").write_bytes(b"mine")
    (data / "9").symlink_to(outside / "1")
    (attempt / "data/evil-0000000b").symlink_to(outside)
    (attempt / "chunks").symlink_to(outside)
    (attempt / ("manifest-" + "0a" * 32 + ".json")).mkdir()
    (attempt / "members").mkdir()
    (attempt / "members" / f"{MEMBER}.json").symlink_to(outside / "1")
    os.mkfifo(data / "11")
    assert reclaim_all(store) > 0
    assert (outside / "1").read_bytes() == b"precious"
    assert all(path.exists() for path in [*foreign, lookalike / "keep", data / "11"])
    assert (data / "9").is_symlink()
    assert (attempt / "chunks").is_symlink()
    assert not any(name.name.isdecimal() and name.is_file() and not name.is_symlink()
                   for name in data.iterdir())  # fmt: skip
    assert store.attempt_parts(RUN, "step-1.0") == []


def test_a_symlink_in_the_place_of_an_attempt_leads_nowhere(
    store: PosixStore, attempt: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    attempt.rename(moved)
    attempt.symlink_to(moved)
    assert store.attempt_parts(RUN, "step-1.0") == []
    below = ".ckptgate/attempts/step-1.0"
    for part in (
        Part(key=f"{below}/data/{MEMBER}/1", kind=PartKind.DATA, size=1),
        Part(key=f"{below}/retired-00000000", kind=PartKind.TREE, size=1),
    ):
        assert store.reclaim(RUN, part) == 0
    assert len(list(moved.rglob("*"))) > 3


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (".ckptgate/log/0000000000.json", PartKind.VOTE),
        ("step-1", PartKind.TREE),
        (".ckptgate/format.json", PartKind.MANIFEST),
        (".ckptgate/attempts/step-1.0", PartKind.TREE),
        ("notes.txt", PartKind.UNFINISHED),
        (".tmp-mine", PartKind.UNFINISHED),
    ],
)
def test_what_no_list_has_is_refused(store: PosixStore, key: str, kind: PartKind) -> None:
    """I9: whoever asks for it."""
    with pytest.raises(RefusedError):
        store.reclaim(RUN, Part(key=key, kind=kind, size=1))


def test_unfinished_writes_of_killed_processes_are_found_where_they_are_made(
    store: PosixStore, attempt: Path
) -> None:
    run = attempt.parents[2]
    places = [run, run / ".ckptgate", run / ".ckptgate/log", run / ".ckptgate/attempts"]
    (run / ".ckptgate/log").mkdir()
    for place in places:
        (place / TEMP).write_bytes(b"half")
        (place / ".tmp-somebody-elses").write_bytes(b"mine")
        (place / f"{TEMP}.bak").write_bytes(b"mine")
    (attempt / TEMP).write_bytes(b"half")
    found = store.unfinished(RUN)
    assert len(found) == len(places)
    stamps = {part.key: part.stamp for part in found}
    (run / TEMP).write_bytes(b"half and more")
    changed = {part.key: part.stamp for part in store.unfinished(RUN)}
    assert {key for key in stamps if stamps[key] != changed[key]} == {TEMP}
    for part in found:
        store.reclaim(RUN, part)
    assert store.unfinished(RUN) == []
    assert all((place / ".tmp-somebody-elses").exists() for place in places)
    kinds = {part.kind for part in store.attempt_parts(RUN, "step-1.0")}
    assert PartKind.UNFINISHED in kinds


@pytest.mark.parametrize("name", ["unlink", "rename", "rmdir", "fsync", "chmod"])
def test_any_call_may_fail_and_the_next_round_ends_it(
    store: PosixStore, attempt: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """I10: the n-th call of each kind fails, for every n, also after its effect."""
    run = attempt.parents[2]
    for is_after in (False, True):
        for at in range(1, 50):
            calls = 0
            real = getattr(syscalls, name)

            def fail(*args, real=real, at=at, is_after=is_after, **kwargs):
                nonlocal calls
                calls += 1
                if calls != at:
                    return real(*args, **kwargs)
                if is_after:
                    real(*args, **kwargs)
                raise OSError(errno.EIO, "injected")

            with monkeypatch.context() as patch:
                patch.setattr(syscalls, name, fail)
                with contextlib.suppress(OSError):
                    reclaim_all(store)
            reclaim_all(store)
            assert store.attempt_parts(RUN, "step-1.0") == []
            assert sorted(path.name for path in attempt.iterdir()) == []
            if calls < at:
                break
            manifest, data = store_checkpoint(
                store, RUN, "step-1.0", "step-1", str(run.parent.parent), {"w.bin": b"w" * 50}
            )
            store.publish(RUN, manifest, data)
            store.unpublish(RUN, "step-1", "step-1.0")
