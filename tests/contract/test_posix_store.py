"""The store on a directory keeps the store's contract, and what is its own besides.

CKPTGATE_TEST_STORE_ROOT names a directory to use instead of a temporary one, and
CKPTGATE_TEST_SECOND_ROOT the same directory as another machine has it mounted.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptgate.errors import (
    CkptError,
    ExistsError,
    IntegrityError,
    RefusedError,
    TransientStoreError,
    UnusableError,
)
from ckptgate.model.documents import EntryType, FileEntry, Manifest, encode
from ckptgate.ports.store import Store, VerifyMode
from ckptgate.testing.samples import MTIME_NS, digested, manifest_of, store_checkpoint, store_file
from ckptgate.testing.store_contract import StoreContract
from ckptgate_adapters.posix_store import PosixStore, syscalls
from ckptgate_adapters.posix_store.mounts import mount_of

ROOT = os.environ.get("CKPTGATE_TEST_STORE_ROOT", "")
SECOND = os.environ.get("CKPTGATE_TEST_SECOND_ROOT", ROOT)


class TestPosixStore(StoreContract):
    def make_place(self, tmp_path: Path) -> str:
        self.opened = 0
        return tempfile.mkdtemp(dir=ROOT) if ROOT else super().make_place(tmp_path)

    def make_store(self, place: str) -> Store:
        self.opened += 1
        if ROOT and self.opened == 2:
            return PosixStore(os.path.join(SECOND, os.path.basename(place)))
        return PosixStore(place)


RUN = "exp/run"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = Path(tempfile.mkdtemp(dir=ROOT)) if ROOT else tmp_path / "store"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture
def spool(tmp_path: Path, root: Path) -> Path:
    """A local directory on the store's file system."""
    place = root.parent / f"spool-{root.name}" if ROOT else tmp_path / "spool"
    place.mkdir()
    return place


def published(
    root: Path, spool: Path, files: dict[str, bytes], attempt: str = "step-1.0"
) -> Manifest:
    store = PosixStore(str(root))
    manifest, data = store_checkpoint(store, RUN, attempt, "step-1", str(spool), files)
    store.publish(RUN, manifest, data)
    return manifest


def test_on_one_file_system_a_file_that_may_be_linked_is_shared_down_to_the_published_name(
    root: Path, spool: Path
) -> None:
    store = PosixStore(str(root))
    local = spool / "f"
    local.write_bytes(b"weights")
    entry = store_file(store, RUN, "step-1.0", "model.pt", str(local), may_link=True, mode=0o640)
    manifest = manifest_of(RUN, "step-1", "step-1.0", [entry])
    store.publish(RUN, manifest, encode(manifest))
    shown = root / RUN / "step-1" / "model.pt"
    assert local.stat().st_ino == (root / RUN / entry.key).stat().st_ino == shown.stat().st_ino
    assert stat.S_IMODE(shown.stat().st_mode) == 0o640


def test_a_file_that_may_change_is_copied(root: Path, spool: Path) -> None:
    store = PosixStore(str(root))
    local = spool / "f"
    local.write_bytes(b"first")
    store.put("d/1", digested(str(local)))
    local.write_bytes(b"other")
    assert store.read("d/1", 0, 10) == b"first"


def test_the_published_list_is_what_b3sum_checks(
    root: Path, spool: Path, require: Callable[[object, str], None]
) -> None:
    require(shutil.which("b3sum"), "b3sum is not installed")
    files = {"a.bin": b"1", "sub/b c.bin": b"2", "back\\slash": b"3", "ünï": b"4", "x\ufffdy": b"5"}
    published(root, spool, files)
    check = ["b3sum", "--check", ".ckptgate/b3sums"]
    shown = root / RUN / "step-1"
    done = subprocess.run(check, cwd=shown, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": OK") == 4
    (shown / "sub" / "b c.bin").unlink()
    (shown / "sub" / "b c.bin").write_bytes(b"9")
    assert subprocess.run(check, cwd=shown, capture_output=True, check=False).returncode != 0


def test_a_file_of_two_checkpoints_keeps_the_attributes_of_each(root: Path, spool: Path) -> None:
    manifest = published(root, spool, {"model.pt": b"same bytes"})
    first = root / RUN / "step-1" / "model.pt"
    changed = msgspec.structs.replace(manifest.entries[0], mode=0o600, mtime_ns=7_000_000_000)
    other = manifest_of(RUN, "step-2", "step-2.0", [changed])
    store = PosixStore(str(root))
    # As if a spool on this file system had a name of it too.
    os.link(root / RUN / changed.key, spool / "linked")
    store.publish(RUN, other, encode(other))
    second = root / RUN / "step-2" / "model.pt"
    assert second.read_bytes() == b"same bytes"
    assert (stat.S_IMODE(first.stat().st_mode), stat.S_IMODE(second.stat().st_mode)) == (
        0o644,
        0o600,
    )
    assert second.stat().st_mtime_ns == 7_000_000_000
    assert first.stat().st_mtime_ns == manifest.entries[0].mtime_ns


def test_directories_keep_their_times_and_modes_though_names_were_added(
    root: Path, spool: Path
) -> None:
    store = PosixStore(str(root))
    local = spool / "f"
    local.write_bytes(b"x")
    entry = store_file(store, RUN, "step-1.0", "a/b/f", str(local))
    dirs = [
        FileEntry(
            path=path,
            type=EntryType.DIR,
            mode=0o555,
            mtime_ns=MTIME_NS,
            uid=os.getuid(),
            gid=os.getgid(),
        )
        for path in ("a", "a/b")
    ]
    manifest = manifest_of(RUN, "step-1", "step-1.0", [entry, *dirs])
    store.publish(RUN, manifest, encode(manifest))
    for path in ("a", "a/b"):
        found = (root / RUN / "step-1" / path).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o555, MTIME_NS)
    # Unwritable directories are no obstacle when the next attempt takes the place.
    published(root, spool, {"x": b"new"}, attempt="step-1.1")
    assert (root / RUN / "step-1" / "x").read_bytes() == b"new"


def test_no_key_leads_through_a_symlink_out_of_the_store(root: Path, tmp_path: Path) -> None:
    """I13: a planted symlink leads nowhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "exp").symlink_to(outside)
    (root / "direct").symlink_to(outside / "secret")
    store = PosixStore(str(root))
    local = tmp_path / "f"
    local.write_bytes(b"x")
    for call in (
        lambda: store.get("exp/secret"),
        lambda: store.read("exp/secret", 0, 10),
        lambda: store.get("direct"),
        lambda: store.create("exp/new", b"x"),
        lambda: store.put("exp/new", digested(str(local))),
        lambda: store.plain_put("exp/new", str(local), mode=0o644, mtime_ns=0),
    ):
        with pytest.raises(UnusableError):
            call()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert store.published_attempt("exp", "secret") == ""


def test_a_hidden_link_in_place_of_data_is_not_followed_when_it_is_published(
    root: Path, spool: Path, tmp_path: Path
) -> None:
    manifest = published(root, spool, {"model.pt": b"secret"})
    (tmp_path / "secret").write_bytes(b"secret")
    data = root / RUN / manifest.entries[0].key
    data.unlink()
    data.symlink_to(tmp_path / "secret")
    again = manifest_of(RUN, "step-2", "step-2.0", manifest.entries)
    with pytest.raises(CkptError):
        PosixStore(str(root)).publish(RUN, again, encode(again))
    assert not (root / RUN / "step-2").exists()


def test_names_of_unfinished_writes_are_not_listed(root: Path) -> None:
    store = PosixStore(str(root))
    store.create("a/b", b"x")
    (root / "a" / ".tmp-ckptgate-0123456789abcdef").write_bytes(b"torn")
    assert store.children("a") == ["b"]
    assert [entry.name for entry in store.plain_list("a")] == ["b"]
    with pytest.raises(RefusedError):
        store.plain_stat("a/.tmp-ckptgate-0123456789abcdef")


def test_a_directory_with_unfinished_writes_alone_is_removed(root: Path) -> None:
    """Whoever was killed in a copy left them; with the directory they would come back."""
    store = PosixStore(str(root))
    store.plain_mkdir("logs/old", 0o755)
    (root / "logs/old/.tmp-ckptgate-0123456789abcdef").write_bytes(b"half")
    (root / "logs/.tmp-ckptgate-0123456789abcdef").write_bytes(b"half")
    with pytest.raises(ExistsError):
        store.plain_remove("logs", is_dir=True)
    assert len(list((root / "logs").iterdir())) == 2
    store.plain_remove("logs/old", is_dir=True)
    store.plain_remove("logs", is_dir=True)
    assert not (root / "logs").exists()


def test_a_missing_root_is_in_doubt_not_empty(root: Path) -> None:
    """I6: a store that isn't mounted is never taken for one without a log."""
    store = PosixStore(str(root / "gone"))
    for call in (
        lambda: store.get("log/0"),
        lambda: store.children("log"),
        lambda: store.create("log/0", b"x"),
        lambda: store.plain_list(""),
        lambda: store.published_attempt("", "step-1"),
        lambda: store.pointer_content("", "latest"),
    ):
        with pytest.raises(TransientStoreError, match="gone"):
            call()
    assert not (root / "gone").exists()


def test_the_probe_names_what_is_wrong_and_a_remedy(root: Path) -> None:
    with pytest.raises(UnusableError, match="does not exist") as missing:
        PosixStore(str(root / "gone dir")).probe()
    assert missing.value.hint == f"mkdir -p '{root}/gone dir'"
    (root / "file").write_bytes(b"")
    with pytest.raises(UnusableError, match="not a directory"):
        PosixStore(str(root / "file")).probe()


def test_a_store_on_a_network_file_system_is_read_back(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 21 0:40 / /mnt/my\\040nfs rw shared:1 - nfs4 server:/export rw,vers=4.2\n"
        "31 21 0:41 / /mnt/old rw - nfs server:/export rw,vers=3\n"
        "32 21 0:42 / /mnt/sshfs rw - fuse.sshfs host: rw\n"
        "33 30 254:1 / /mnt/my\\040nfs/local rw - xfs /dev/vdb rw\n"
    )
    found = {
        path: mount_of(path, str(table))
        for path in ("/mnt/my nfs/a", "/mnt/my nfs/local/b", "/mnt/old", "/mnt/sshfs", "/mnt/other")
    }
    assert [mount.type for mount in found.values()] == ["nfs4", "xfs", "nfs", "fuse.sshfs", "ext4"]
    assert [mount.is_network for mount in found.values()] == [True, False, True, True, False]
    assert found["/mnt/old"].is_nfs3


def test_reading_back_compares_each_chunk_by_name(
    root: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: one flipped bit in the second chunk is found, and named."""
    monkeypatch.setattr("ckptgate_adapters.posix_store.data.CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr("ckptgate_adapters.posix_store.data._BUFFER_BYTES", 1 << 18)
    monkeypatch.setattr("ckptgate.testing.samples.CHUNK_BYTES", 1 << 20)
    local = spool / "f"
    local.write_bytes(os.urandom((2 << 20) + 12345))
    store = PosixStore(str(root))
    source = digested(str(local))
    assert len(source.chunks) == 3 * 32
    store.put("d/1", source)
    store.verify("d/1", source, VerifyMode.READBACK)
    with (root / "d" / "1").open("r+b") as stored:
        stored.seek((1 << 20) + 5)
        byte = stored.read(1)
        stored.seek((1 << 20) + 5)
        stored.write(bytes([byte[0] ^ 1]))
    store.verify("d/1", source, VerifyMode.SIZE)
    with pytest.raises(IntegrityError, match=r"chunk 1 of 'd/1'"):
        store.verify("d/1", source, VerifyMode.READBACK)


def test_without_direct_reads_the_pages_are_dropped_first(
    root: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: advised.append(args[3]))
    local = spool / "f"
    local.write_bytes(b"x" * 100_000)
    store = PosixStore(str(root))
    source = digested(str(local))
    store.put("d/1", source)
    store.verify("d/1", source, VerifyMode.READBACK)
    assert advised == [os.POSIX_FADV_DONTNEED]


def test_a_copy_without_the_kernels_help_is_the_same(
    root: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EXDEV, "cross-device")

    monkeypatch.setattr(syscalls, "clone", refuse)
    monkeypatch.setattr(syscalls, "copy_range", refuse)
    data = os.urandom(9_000_001)
    local = spool / "f"
    local.write_bytes(data)
    store = PosixStore(str(root))
    source = digested(str(local))
    store.put("d/1", source)
    store.verify("d/1", source, VerifyMode.READBACK)


def test_an_unmounted_store_is_not_taken_for_an_empty_one(
    tmp_path: Path, require: Callable[[object, str], None]
) -> None:
    """I6: the empty mount point below is another file system, and nothing is written to it."""
    root = tmp_path / "store"
    root.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "ckptgate-test", str(root)]
    done = subprocess.run(mounting, capture_output=True, check=False)
    require(done.returncode == 0, "mounting a tmpfs needs root")
    store = PosixStore(str(root))
    store.create("log/0", b"x")
    subprocess.run(["umount", "-l", str(root)], check=True)
    for call in (lambda: store.get("log/0"), lambda: store.create("log/1", b"y")):
        with pytest.raises(TransientStoreError, match="tmpfs"):
            call()
    assert list(root.iterdir()) == []


def test_an_edit_through_a_published_name_is_left_to_the_check_of_the_object(
    root: Path, tmp_path: Path
) -> None:
    """One inode, so it was read already; a copy in its place is read."""
    store = PosixStore(str(root))
    manifest, data = store_checkpoint(store, RUN, "s.0", "s", str(tmp_path), {"m": b"precious"})
    store.publish(RUN, manifest, data)
    path = root / RUN / "s" / "m"
    path.chmod(0o644)
    path.write_bytes(b"Precious")
    assert store.published_problems(RUN, manifest, data) == []
    path.unlink()
    path.write_bytes(b"Precious")
    (problem,) = store.published_problems(RUN, manifest, data)
    assert problem.startswith("s/m: published bytes have digest ")
    path.unlink()
    path.write_bytes(b"precious")
    assert store.published_problems(RUN, manifest, data) == []


def test_the_gateways_own_files_in_a_published_directory_count(root: Path, tmp_path: Path) -> None:
    """`b3sum --check .ckptgate/b3sums` is what people without ckptgate trust."""
    store = PosixStore(str(root))
    manifest, data = store_checkpoint(
        store, RUN, "s.0", "s", str(tmp_path), {"m": b"1", "sub/n": b"2"}
    )
    store.publish(RUN, manifest, data)
    own = root / RUN / "s" / ".ckptgate"
    (own / "b3sums").write_bytes(b"")
    (own / "manifest.json").unlink()
    (own / "manifest.json").symlink_to("/etc/passwd")
    (own / "more").touch()
    os.mkfifo(root / RUN / "s" / "pipe")
    shutil.rmtree(root / RUN / "s" / "sub")
    (root / RUN / "s" / "sub").symlink_to("/usr")
    assert store.published_problems(RUN, manifest, data) == [
        "s/.ckptgate/b3sums: not as published",
        "s/.ckptgate/manifest.json: not as published",
        "s/.ckptgate/more: published by others",
        "s/pipe: published, but not in the manifest",
        "s/sub: published as a symlink, committed as a dir",
    ]
    shutil.rmtree(own)
    assert "s/.ckptgate: missing in the published directory" in store.published_problems(
        RUN, manifest, data
    )
    shutil.rmtree(root / RUN / "s")
    (root / RUN / "s").symlink_to("/usr")
    assert store.published_problems(RUN, manifest, data) == [
        "s: the published directory is not there"
    ]
