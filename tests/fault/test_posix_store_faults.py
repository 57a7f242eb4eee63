"""The directory store under failing system calls, crashes, full and read-only disks, and races.

Every mutating call of the adapter goes through its module `syscalls`; here each one fails in turn,
before or after its effect, or ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from ckptgate.errors import (
    CkptError,
    ExistsError,
    FullError,
    IntegrityError,
    MissingError,
    TransientStoreError,
    UnusableError,
)
from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    Manifest,
    PointerKind,
    PointerValue,
    encode,
)
from ckptgate.ports.store import VerifyMode
from ckptgate.testing.faults import CrashError
from ckptgate.testing.samples import MTIME_NS, digested, manifest_of, store_checkpoint, store_file
from ckptgate_adapters.posix_store import PosixStore, syscalls

RUN = "exp/run"
CODES = [errno.EIO, errno.ENOSPC, errno.ESTALE]
Require = Callable[[object, str], None]


class Breaker:
    """Makes the n-th mutating system call fail; `crash` lets nothing happen any more after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.calls: list[str] = []
        self.set(at=0)
        for name in syscalls.MUTATING:
            monkeypatch.setattr(syscalls, name, self._wrapped(name, getattr(syscalls, name)))

    def set(self, *, at: int, when: str = "before", code: int = errno.EIO) -> None:
        self.at, self.when, self.code = at, when, code
        self.is_dead = False
        self.is_spent = False
        self.calls.clear()

    def end(self) -> None:
        """No more faults; whether there was one stays known."""
        self.at, self.is_dead = 0, False

    def _wrapped(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def broken(*args: object, **kwargs: object) -> object:
            with self._lock:
                if self.is_dead:
                    raise CrashError
                self.calls.append(name)
                is_hit = len(self.calls) == self.at
            if not is_hit:
                return call(*args, **kwargs)
            self.is_spent = True
            if self.when in {"after", "crash-after"}:
                call(*args, **kwargs)
            elif name == "close_written":
                # A failed close has closed.
                call(*args, **kwargs)
            if self.when.startswith("crash"):
                self.is_dead = True
                raise CrashError
            raise OSError(self.code, os.strerror(self.code))

        return broken


@pytest.fixture
def breaker(monkeypatch: pytest.MonkeyPatch) -> Breaker:
    return Breaker(monkeypatch)


@pytest.fixture
def tmpfs(tmp_path: Path, require: Require) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0777", "ckptgate-test", str(place)]
    done = subprocess.run(mounting, capture_output=True, check=False)
    require(done.returncode == 0, "mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def each_fault(breaker: Breaker, base: Path, when: str, code: int = errno.EIO) -> Iterator[Path]:
    """A fresh store directory for each call that can fail, until a run meets no fault."""
    for at in count(1):
        root = base / f"{when}-{at}"
        root.mkdir()
        breaker.set(at=at, when=when, code=code)
        yield root
        if not breaker.is_spent:
            assert at > 3, "the adapter made hardly any call through its shim"
            return


def temps(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".tmp-*")]


# Records


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("code", CODES)
def test_create_is_right_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, when: str, code: int
) -> None:
    """I6: what a caller is told never contradicts what is stored; I10."""
    for root in each_fault(breaker, tmp_path, when, code):
        store = PosixStore(str(root))
        try:
            store.create("exp/log/0", b"record")
        except FullError:
            with pytest.raises(MissingError):
                store.get("exp/log/0")
        except (TransientStoreError, UnusableError):
            pass
        else:
            assert store.get("exp/log/0") == b"record"
        breaker.end()
        store.create("exp/log/0", b"record")
        assert store.get("exp/log/0") == b"record"
        assert store.children("exp/log") == ["0"]
        with pytest.raises(ExistsError):
            store.create("exp/log/0", b"another")


@pytest.mark.parametrize("when", ["crash", "crash-after"])
def test_create_leaves_all_or_nothing_when_the_process_dies(
    breaker: Breaker, tmp_path: Path, when: str
) -> None:
    """I10, I13: there is never a torn record."""
    for root in each_fault(breaker, tmp_path, when):
        with contextlib.suppress(CrashError):
            PosixStore(str(root)).create("exp/log/0", b"record")
        breaker.end()
        store = PosixStore(str(root))
        try:
            assert store.get("exp/log/0") == b"record"
        except MissingError:
            store.create("exp/log/0", b"the next process's")
            assert store.children("exp/log") == ["0"]


# Data objects


@pytest.mark.parametrize("may_link", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("code", CODES)
def test_put_is_right_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, when: str, code: int, may_link: bool
) -> None:
    """I1, I6."""
    local = tmp_path / "f"
    data = os.urandom(300_001)
    local.write_bytes(data)
    source = digested(str(local), may_link=may_link)
    for root in each_fault(breaker, tmp_path, when, code):
        store = PosixStore(str(root))
        try:
            store.put("exp/data/1", source)
        except IntegrityError:
            raise
        except CkptError:
            assert (
                not (root / "exp/data/1").exists() or store.read("exp/data/1", 0, 400_000) == data
            )
        else:
            store.verify("exp/data/1", source, VerifyMode.READBACK)
        breaker.end()
        store.put("exp/data/1", source)
        store.verify("exp/data/1", source, VerifyMode.READBACK)
        assert store.children("exp/data") == ["1"]
        assert local.read_bytes() == data


@pytest.mark.parametrize("name", ["write", "fsync", "close_written"])
def test_after_a_failed_fsync_the_bytes_are_written_again_under_another_name(
    breaker: Breaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """I11: the kernel tells of a lost page once, so the same file is never fsynced again."""
    monkeypatch.setattr(syscalls, "clone", _unsupported)
    monkeypatch.setattr(syscalls, "copy_range", _unsupported)
    local = tmp_path / "f"
    local.write_bytes(b"bytes" * 1000)
    store = PosixStore(str(tmp_path))
    store.create("d/first", b"the directory is there")
    breaker.set(at=0)
    source = digested(str(local))
    store.put("d/1", source)
    breaker.set(at=breaker.calls.index(name) + 1)
    store.put("d/2", source)
    calls = Counter(breaker.calls)
    assert calls["create_file"] == 2
    assert calls["fsync"] == {"write": 2, "fsync": 3, "close_written": 3}[name]
    store.verify("d/2", source, VerifyMode.READBACK)
    assert temps(tmp_path) == []


def test_when_a_linked_files_fsync_fails_only_bytes_with_the_right_digest_are_taken(
    breaker: Breaker, tmp_path: Path
) -> None:
    """I1: its pages may be lost, so it is copied and each byte is digested again."""
    local = tmp_path / "f"
    local.write_bytes(b"right")
    source = digested(str(local), may_link=True)
    store = PosixStore(str(tmp_path))
    store.create("d/first", b"the directory is there")
    breaker.set(at=0)
    store.put("d/1", source)
    at = breaker.calls.index("fsync") + 1
    breaker.set(at=at)
    store.put("d/2", source)
    assert (tmp_path / "d/2").stat().st_ino != local.stat().st_ino
    local.write_bytes(b"wrong")
    breaker.set(at=at)
    with pytest.raises(IntegrityError, match="no longer has the bytes"):
        store.put("d/3", source)
    assert store.children("d") == ["1", "2", "first"]


def test_a_store_that_always_fails_is_given_up_after_three_names(
    breaker: Breaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "f"
    local.write_bytes(b"bytes")
    store = PosixStore(str(tmp_path))
    store.create("d/first", b"the directory is there")
    breaker.set(at=0)
    monkeypatch.setattr(syscalls, "fsync", _broken)
    with pytest.raises(TransientStoreError):
        store.put("d/1", digested(str(local)))
    assert breaker.calls.count("create_file") == 3
    assert temps(tmp_path) == []


def _unsupported(*args: object) -> int:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _broken(*args: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# Publication


def snapshot(top: Path) -> dict[str, tuple[object, ...]]:
    """All of a directory: kind, bytes or target, mode, mtime; without the gateway's own files."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        info = path.lstat()
        if name.startswith(".ckptgate"):
            found[name] = (path.read_bytes() if path.is_file() else "dir",)
        elif path.is_symlink():
            found[name] = (os.readlink(path), info.st_mtime_ns)
        else:
            contents = path.read_bytes() if path.is_file() else "dir"
            found[name] = (contents, stat.S_IMODE(info.st_mode), info.st_mtime_ns)
    return found


def other_entry(path: str, kind: EntryType, mode: int, target: str = "") -> FileEntry:
    return FileEntry(
        path=path,
        type=kind,
        mode=mode,
        mtime_ns=MTIME_NS,
        target=target,
        uid=os.getuid(),
        gid=os.getgid(),
    )


def rich_checkpoint(store: PosixStore, spool: Path) -> tuple[Manifest, bytes]:
    """Files, one of them linked, directories and a symlink."""
    spool.mkdir()
    (spool / "a").write_bytes(b"new a")
    (spool / "b").write_bytes(b"new b")
    one, two = str(spool / "a"), str(spool / "b")
    entries = [
        store_file(store, RUN, "step-1.1", "a.bin", one, mode=0o640, may_link=True, file=1),
        store_file(store, RUN, "step-1.1", "sub/b.bin", two, mode=0o600, file=2),
        other_entry("sub", EntryType.DIR, 0o750),
        other_entry("void", EntryType.DIR, 0o700),
        other_entry("l", EntryType.SYMLINK, 0o777, target="a.bin"),
    ]
    manifest = manifest_of(RUN, "step-1", "step-1.1", entries)
    return manifest, encode(manifest)


def occupy(store: PosixStore, root: Path, spool: Path, by: str) -> None:
    """Put something where the checkpoint is to appear."""
    if by == "older":
        spool.mkdir()
        old, data = store_checkpoint(
            store, RUN, "step-1.0", "step-1", str(spool), {"x": b"old", "y": b"old"}
        )
        store.publish(RUN, old, data)
    elif by == "foreign":
        place = root / RUN / "step-1"
        place.mkdir(parents=True)
        (place / "theirs").write_bytes(b"precious")


def check_kept(root: Path, by: str) -> None:
    """What was there before is somewhere below the run, whole."""
    kept = root / RUN / ".ckptgate"
    if by == "older":
        data = list((kept / "attempts" / "step-1.0" / "data").rglob("*"))
        assert [path.read_bytes() for path in data if path.is_file()] == [b"old", b"old"]
    elif by == "foreign":
        assert [path.read_bytes() for path in kept.glob("displaced/*/theirs")] == [b"precious"]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, ...]]:
    """The tree as a publication without any fault makes it."""
    base = tmp_path_factory.mktemp("reference")
    (base / "store").mkdir()
    store = PosixStore(str(base / "store"))
    store.publish(RUN, *rich_checkpoint(store, base / "spool"))
    return snapshot(base / "store" / RUN / "step-1")


@pytest.mark.parametrize("by", ["nothing", "older", "foreign"])
@pytest.mark.parametrize("when", ["crash", "crash-after"])
def test_a_crash_at_any_point_of_publishing_ends_in_the_same_tree(
    breaker: Breaker, tmp_path: Path, wanted: dict[str, tuple[object, ...]], by: str, when: str
) -> None:
    """I8, I10: a reader sees one attempt or none, and publishing again reaches the same result."""
    for at in count(1):
        base = tmp_path / f"{at}"
        (base / "store").mkdir(parents=True)
        root = base / "store"
        store = PosixStore(str(root))
        breaker.set(at=0)
        occupy(store, root, base / "old", by)
        manifest, data = rich_checkpoint(store, base / "spool")
        place = root / RUN / "step-1"
        before = snapshot(place) if place.exists() else {}
        breaker.set(at=at, when=when)
        with contextlib.suppress(CrashError):
            store.publish(RUN, manifest, data)
        breaker.end()
        seen = snapshot(place) if place.exists() else {}
        assert seen in ({}, before, wanted), f"call {at} left a part of it"
        again = PosixStore(str(root))
        again.publish(RUN, manifest, data)
        assert snapshot(place) == wanted, f"after a crash at call {at}"
        assert os.listdir(root / RUN / ".ckptgate/attempts/step-1.1") == ["data"]
        check_kept(root, by)
        if not breaker.is_spent:
            assert at > 20
            return


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_publishing_is_right_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, wanted: dict[str, tuple[object, ...]], when: str, code: int
) -> None:
    """I6, I10: success is only said of the whole tree."""
    for at in count(1):
        base = tmp_path / f"{at}"
        (base / "store").mkdir(parents=True)
        root = base / "store"
        store = PosixStore(str(root))
        breaker.set(at=0)
        occupy(store, root, base / "old", "older")
        manifest, data = rich_checkpoint(store, base / "spool")
        place = root / RUN / "step-1"
        before = snapshot(place)
        breaker.set(at=at, when=when, code=code)
        try:
            store.publish(RUN, manifest, data)
        except CkptError:
            seen = snapshot(place) if place.exists() else {}
            assert seen in ({}, before, wanted), f"call {at} left a part of it"
        else:
            assert snapshot(place) == wanted, f"call {at} failed unnoticed"
        breaker.end()
        store.publish(RUN, manifest, data)
        assert snapshot(place) == wanted
        check_kept(root, "older")
        if not breaker.is_spent:
            return


def test_without_locks_a_tree_that_another_has_just_finished_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, tuple[object, ...]]
) -> None:
    """I8, I10: looking and moving are two calls; the other's whole publication falls between."""
    (tmp_path / "store").mkdir()
    root = tmp_path / "store"
    store, other = PosixStore(str(root)), PosixStore(str(root))
    occupy(store, root, tmp_path / "old", "older")
    manifest, data = rich_checkpoint(store, tmp_path / "spool")
    monkeypatch.setattr("ckptgate_adapters.posix_store.publication._try_lock", lambda fd: True)
    rename = syscalls.rename

    def late(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if new.startswith("replaced-"):
            monkeypatch.setattr(syscalls, "rename", rename)
            other.publish(RUN, manifest, data)
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(syscalls, "rename", late)
    store.publish(RUN, manifest, data)
    assert snapshot(root / RUN / "step-1") == wanted
    attempts = root / RUN / ".ckptgate/attempts"
    assert [path.name for path in (attempts / "step-1.1").iterdir()] == ["data"]
    assert len(list((attempts / "step-1.0").glob("replaced-*"))) == 1


@pytest.mark.parametrize("kind", list(PointerKind))
@pytest.mark.parametrize("when", ["before", "after", "crash", "crash-after"])
def test_a_pointer_has_its_old_or_its_new_value_whichever_call_fails(
    breaker: Breaker, tmp_path: Path, when: str, kind: PointerKind
) -> None:
    """I10."""
    old = PointerValue(pointer="latest", kind=kind, target="step-1", content="step-1")
    new = PointerValue(pointer="latest", kind=kind, target="step-2", content="step-2")
    for at in count(1):
        root = tmp_path / f"{at}"
        root.mkdir()
        store = PosixStore(str(root))
        breaker.set(at=0)
        store.set_pointer(RUN, old)
        breaker.set(at=at, when=when)
        try:
            store.set_pointer(RUN, new)
        except (CkptError, CrashError):
            is_told = False
        else:
            is_told = True
        breaker.end()
        content = store.pointer_content(RUN, "latest")
        assert content in ({"step-2"} if is_told else {"step-1", "step-2"})
        store.set_pointer(RUN, new)
        assert store.pointer_content(RUN, "latest") == "step-2"
        assert [entry.name for entry in store.plain_list(RUN)] == ["latest"]
        if not breaker.is_spent:
            assert at > 3
            return


# Disks


def test_a_full_store_refuses_loudly_and_shows_nothing_of_it(tmpfs: Path, tmp_path: Path) -> None:
    """I11: a full disk loses nothing: the staged bytes stay, and the same call succeeds later."""
    local = tmp_path / "f"
    data = os.urandom(900_000)
    local.write_bytes(data)
    source = digested(str(local))
    store = PosixStore(str(tmpfs))
    filler = tmpfs / "filler"
    filler.write_bytes(b"x" * 400_000)
    with pytest.raises(FullError) as raised:
        store.put("exp/data/1", source)
    assert raised.value.subject == "exp/data/1"
    assert store.children("exp/data") == []
    assert temps(tmpfs) == []
    with filler.open("ab", buffering=0) as more, pytest.raises(OSError, match="No space"):
        while True:
            more.write(b"x" * 4096)
    with pytest.raises(FullError):
        store.create("exp/log/0", b"record")
    with pytest.raises(UnusableError, match="full") as full:
        store.probe()
    assert "df -h" in full.value.hint
    with pytest.raises(MissingError):
        store.get("exp/log/0")
    assert temps(tmpfs) == []
    filler.unlink()
    store.put("exp/data/1", source)
    store.create("exp/log/0", b"record")
    store.verify("exp/data/1", source, VerifyMode.READBACK)
    store.probe()


def test_a_read_only_store_is_unusable_for_writing_and_still_read(
    tmpfs: Path, tmp_path: Path
) -> None:
    local = tmp_path / "f"
    local.write_bytes(b"x")
    store = PosixStore(str(tmpfs))
    store.create("a/b", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    for call in (
        lambda: store.create("a/c", b"x"),
        lambda: store.put("a/c", digested(str(local))),
        lambda: store.plain_mkdir("d", 0o755),
    ):
        with pytest.raises(UnusableError, match=r"[Rr]ead-only"):
            call()
    with pytest.raises(UnusableError, match="read-only") as raised:
        store.probe()
    assert raised.value.hint.startswith("mount -o remount,rw")
    assert store.get("a/b") == b"x"
    store.create("a/b", b"x")


def test_a_store_without_hard_links_is_refused_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(syscalls, "link", refuse)
    with pytest.raises(UnusableError, match=r"link\(2\)"):
        PosixStore(str(tmp_path)).probe()
    assert list(tmp_path.iterdir()) == []


def test_a_store_whose_links_replace_what_is_there_is_refused_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I7: without put-if-absent there is no log."""

    def replace(source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.rename(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(syscalls, "link", replace)
    with pytest.raises(UnusableError, match="put-if-absent"):
        PosixStore(str(tmp_path)).probe()
    assert list(tmp_path.iterdir()) == []


# Races of processes

CREATOR = """
    import sys
    from ckptgate.errors import ExistsError
    from ckptgate_adapters.posix_store import PosixStore
    root, me, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = PosixStore(root)
    print("ready", flush=True)
    sys.stdin.readline()
    for at in range(rounds):
        try:
            store.create(f"log/{at}", f"{me}\\n".encode())
        except ExistsError:
            continue
        print(at, flush=True)
"""

PUBLISHER = """
    import sys
    from ckptgate.model.documents import Manifest, decode
    from ckptgate_adapters.posix_store import PosixStore
    root, run, manifest = sys.argv[1:]
    data = open(manifest, "rb").read()
    store = PosixStore(root)
    print("ready", flush=True)
    sys.stdin.readline()
    store.publish(run, decode(data, Manifest, subject=manifest), data)
"""


def run_together(script: str, arguments: list[list[str]]) -> list[list[str]]:
    """Start one process for each list of arguments, let all go at once; their printed lines."""
    program = textwrap.dedent(script)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for args in arguments
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return printed


def test_of_eight_creating_processes_exactly_one_wins_each_key(tmp_path: Path) -> None:
    """I2, I3, I7."""
    rounds = 40
    printed = run_together(CREATOR, [[str(tmp_path), str(me), str(rounds)] for me in range(8)])
    assert Counter(int(at) for won in printed for at in won) == Counter(range(rounds))
    store = PosixStore(str(tmp_path))
    for me, won in enumerate(printed):
        assert all(store.get(f"log/{at}") == b"%d\n" % me for at in won)
    assert temps(tmp_path) == []


def test_two_publishing_processes_leave_one_whole_tree(
    tmp_path: Path, wanted: dict[str, tuple[object, ...]]
) -> None:
    """I8, I10: any survivor finishes, whoever else is at it."""
    for at in range(5):
        root = tmp_path / f"store-{at}"
        root.mkdir()
        store = PosixStore(str(root))
        occupy(store, root, tmp_path / f"old-{at}", "older")
        manifest, data = rich_checkpoint(store, tmp_path / f"spool-{at}")
        file = tmp_path / f"manifest-{at}"
        file.write_bytes(data)
        run_together(PUBLISHER, [[str(root), RUN, str(file)]] * 2)
        assert snapshot(root / RUN / "step-1") == wanted
        assert os.listdir(root / RUN / ".ckptgate/attempts/step-1.1") == ["data"]
        check_kept(root, "older")
        assert store.published_attempt(RUN, manifest.name) == manifest.attempt
