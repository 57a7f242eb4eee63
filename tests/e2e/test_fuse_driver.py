"""The FUSE driver on the real kernel, with a small file system behind it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.facilities import lacking

from ckptgate.errors import CkptError
from ckptgate_adapters.fuse import MountOptions, channel

pytestmark = pytest.mark.fuse

_ANY = "Errno"
"""The errno is looked at afterwards."""

_libc = ctypes.CDLL(None, use_errno=True)
_WITHOUT_ADMIN = ("--inh-caps=-sys_admin", "--bounding-set=-sys_admin")
_ROOT = Path(__file__).resolve().parents[2]


class Toy:
    """A mount, its descriptor, and the process that serves it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root / "spool"
        self.mnt = root / "mnt"
        self.root.mkdir()
        self.mnt.mkdir()
        self.options = options
        self.fd = channel.mount(str(self.mnt), MountOptions(fsname="toy"))
        self.process = self.start()

    def start(self, **more: Any) -> subprocess.Popen[str]:
        options = {"root": str(self.root), "fd": self.fd, **self.options, **more}
        prefix = ["setpriv", *_WITHOUT_ADMIN] if options.get("is_unprivileged") else []
        with (self.root / "log").open("a") as log:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.e2e.toyfs", json.dumps(options)],
                cwd=_ROOT,
                pass_fds=[self.fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert process.stdout is not None
        assert process.stdout.readline() == '"ready"\n', self.log()
        return process

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def counts(self) -> dict[str, int]:
        return dict(self.ask("counts"))

    def is_passing(self) -> bool:
        # The first answer proves that INIT is done; an open decides the rest.
        os.stat(self.mnt)
        return bool(self.ask("passthrough") == "on")

    def log(self) -> str:
        return (self.root / "log").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def take_over(self, **more: Any) -> None:
        self.kill()
        self.process = self.start(resume=True, **more)

    def close(self) -> None:
        # Whoever still waits for this mount must not wait for ever.
        with contextlib.suppress(OSError):
            channel.abort(str(self.mnt))
        with contextlib.suppress(OSError):
            channel.unmount(str(self.mnt), lazy=True)
        self.kill()
        os.close(self.fd)


_CLIENT = """
import json, mmap, os, sys, threading
scope = {"os": os, "mmap": mmap}
for line in sys.stdin:
    code = json.loads(line)
    try:
        result = eval(code, scope)
    except SyntaxError:
        result = exec(code, scope)
    except OSError as exc:
        result = ["OSError", exc.errno]
    print(json.dumps(result, default=repr), flush=True)
"""


class Client:
    """A process that uses a mount.

    The tests' own process must hold no file of a mount while it starts a server: the child closes
    its copies before exec, and each close waits for the server that is not there yet.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, code: str) -> Any:
        self.begin(code)
        return self.end()

    def is_waiting(self, seconds: float = 0.15) -> bool:
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], seconds)[0]

    def close(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture
def other_client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def need_mount() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        if os.environ.get("CI") == "true":
            pytest.fail("no /dev/fuse")
        lacking("no /dev/fuse")


@contextlib.contextmanager
def mounted(root: Path, **options: Any) -> Iterator[Toy]:
    need_mount()
    try:
        toy = Toy(root, **options)
    except CkptError as exc:
        if os.environ.get("CI") == "true":
            raise
        lacking(f"cannot mount: {exc}")
    try:
        yield toy
    finally:
        toy.close()


@pytest.fixture(params=["passthrough", "fallback", "partial"])
def toy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Toy]:
    options = {
        "passthrough": {},
        "fallback": {"passthrough": False},
        "partial": {"is_complete": False},
    }[request.param]
    with mounted(tmp_path, **options) as toy:
        yield toy


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Toy]:
    with mounted(tmp_path) as toy:
        yield toy


@pytest.fixture
def sticky(tmp_path: Path) -> Iterator[Toy]:
    """Names and attributes that the kernel keeps for an hour."""
    with mounted(tmp_path, timeout_s=3600.0) as toy:
        yield toy


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.01)


# -- what every way of serving must do


def test_files_are_written_and_read_back(toy: Toy) -> None:
    data = os.urandom((3 << 20) + 17)
    path = toy.mnt / "a"
    path.write_bytes(data)
    assert path.read_bytes() == data
    assert path.stat().st_size == len(data)
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"middle")
    assert path.read_bytes()[1 << 20 :][:6] == b"middle"
    os.truncate(path, 100)
    assert path.read_bytes() == data[:100]
    with path.open("wb") as file:
        file.write(b"short")
        file.flush()
        os.fsync(file.fileno())
    assert path.read_bytes() == b"short"


def test_append_and_direct_io_at_any_alignment(toy: Toy) -> None:
    path = toy.mnt / "log"
    for line in (b"one\n", b"two\n"):
        with path.open("ab") as file:
            file.write(line)
    assert path.read_bytes() == b"one\ntwo\n"
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    assert os.pwrite(fd, b"XYZ", 1) == 3
    assert os.pread(fd, 5, 0) == b"oXYZt"
    os.close(fd)
    assert path.read_bytes() == b"oXYZtwo\n"


def test_shared_mappings_see_writes_and_are_seen(toy: Toy) -> None:
    path = toy.mnt / "map"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as view:
        view[4096:4099] = b"abc"
        view.flush()
        assert os.pread(file.fileno(), 3, 4096) == b"abc"
    assert path.read_bytes()[4096:4099] == b"abc"


def test_names_are_renamed_exchanged_and_removed(toy: Toy) -> None:
    (toy.mnt / "a").write_text("a")
    (toy.mnt / "b").write_text("b")
    exchange = [-100, bytes(toy.mnt / "a"), -100, bytes(toy.mnt / "b")]
    assert _libc.renameat2(*exchange, 2) == 0
    assert (toy.mnt / "a").read_text() == "b"
    assert (toy.mnt / "b").read_text() == "a"
    assert _libc.renameat2(*exchange, 1) == -1
    assert ctypes.get_errno() == errno.EEXIST
    os.rename(toy.mnt / "a", toy.mnt / "b")
    assert (toy.mnt / "b").read_text() == "b"
    (toy.mnt / "d").mkdir()
    with pytest.raises(OSError, match="Operation not permitted"):
        os.link(toy.mnt / "b", toy.mnt / "c")
    with pytest.raises(OSError, match="Operation not permitted"):
        os.mkfifo(toy.mnt / "fifo")
    os.symlink("b", toy.mnt / "s")
    assert os.readlink(toy.mnt / "s") == "b"
    os.rmdir(toy.mnt / "d")
    assert sorted(os.listdir(toy.mnt)) == ["b", "s"]


def test_an_unlinked_file_lives_until_it_is_closed(toy: Toy) -> None:
    path = toy.mnt / "gone"
    with path.open("w+b") as file:
        file.write(b"before")
        file.flush()
        path.unlink()
        assert not path.exists()
        file.write(b" after")
        file.flush()
        assert os.pread(file.fileno(), 100, 0) == b"before after"
        assert os.fstat(file.fileno()).st_nlink == 0


def test_a_directory_of_5000_names_is_listed_whole(toy: Toy) -> None:
    names = [f"file-{number:05d}-{'x' * (number % 40)}" for number in range(5000)]
    for name in names:
        os.mknod(toy.mnt / name, 0o644)
    assert sorted(os.listdir(toy.mnt)) == sorted(names)
    with os.scandir(toy.mnt) as listing:
        assert sum(item.stat().st_size == 0 for item in listing) == 5000


def test_extended_attributes_keep_the_size_protocol(toy: Toy) -> None:
    path = toy.mnt / "x"
    path.touch()
    os.setxattr(path, "user.one", b"1" * 1000)
    os.setxattr(path, "user.two", b"")
    assert os.getxattr(path, "user.one") == b"1" * 1000
    assert os.getxattr(path, "user.two") == b""
    assert os.listxattr(path) == ["user.one", "user.two"]
    buffer = ctypes.create_string_buffer(10)
    assert _libc.getxattr(bytes(path), b"user.one", buffer, 10) == -1
    assert ctypes.get_errno() == errno.ERANGE
    os.removexattr(path, "user.one")
    with pytest.raises(OSError, match="No data"):
        os.getxattr(path, "user.one")


def test_holes_copies_and_allocation_work(toy: Toy) -> None:
    path, copy = toy.mnt / "sparse", toy.mnt / "copy"
    with path.open("w+b") as file:
        os.pwrite(file.fileno(), b"end", 1 << 20)
    is_whole = toy.options.get("is_complete", True)
    with path.open("rb") as source, copy.open("w+b") as target:
        hole = os.lseek(source.fileno(), 0, os.SEEK_HOLE)
        assert hole == (0 if is_whole else (1 << 20) + 3)
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        done = 0
        while done < (1 << 20) + 3:
            done += os.copy_file_range(source.fileno(), target.fileno(), 1 << 30)
    assert copy.read_bytes() == path.read_bytes()
    with copy.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 2 << 20)
    assert copy.stat().st_size == 2 << 20


def test_attributes_change_and_locks_stay_in_the_kernel(toy: Toy) -> None:
    path = toy.mnt / "f"
    path.touch()
    path.chmod(0o640)
    os.chown(path, 12, 34)
    os.utime(path, ns=(10**18, 10**18 + 7))
    seen = path.stat()
    assert (seen.st_mode & 0o7777, seen.st_uid, seen.st_gid) == (0o640, 12, 34)
    assert seen.st_mtime_ns == 10**18 + 7
    before = time.time_ns()
    os.utime(path)
    assert path.stat().st_mtime_ns >= before - 10**9
    with path.open("r+b") as one, path.open("r+b") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.statvfs(toy.mnt)
    counts = toy.counts()
    assert "SETLK" not in counts


# -- the driver's own rules


def test_passthrough_means_no_read_and_no_write_reaches_the_server(plain: Toy) -> None:
    if not plain.is_passing():
        pytest.skip(f"passthrough is {plain.ask('passthrough')}")
    data = os.urandom(4 << 20)
    (plain.mnt / "a").write_bytes(data)
    assert (plain.mnt / "a").read_bytes() == data
    with (plain.mnt / "a").open("r+b") as one, (plain.mnt / "a").open("rb") as two:
        one.write(b"changed")
        one.flush()
        assert os.pread(two.fileno(), 7, 0) == b"changed"
    counts = plain.counts()
    assert counts.get("READ", 0) == counts.get("WRITE", 0) == 0
    assert counts["OPEN"] == 3
    # Every id was closed with its last handle.
    wait_for(lambda: plain.counts().get("RELEASE", 0) == 4)


def test_a_bug_in_a_handler_is_eio_not_einval(plain: Toy) -> None:
    for name in ("bug-1", "no-errno-1"):
        with pytest.raises(OSError, match=_ANY) as caught:
            os.stat(plain.mnt / name)
        assert caught.value.errno == errno.EIO
    (plain.mnt / "fine").write_text("still alive")
    assert "ZeroDivisionError" in plain.log()


def test_what_would_block_is_done_on_the_pool(plain: Toy) -> None:
    (plain.mnt / "slow-dir").mkdir()
    (plain.mnt / "slow-file").write_bytes(b"x" * 100)
    assert (plain.mnt / "slow-file").read_bytes() == b"x" * 100
    assert plain.ask("done").count("make slow-dir") == 1


def test_names_that_are_not_utf8_are_refused(plain: Toy) -> None:
    with pytest.raises(OSError, match=_ANY) as caught:
        os.mkdir(bytes(plain.mnt) + b"/\xff\xfe")
    assert caught.value.errno == errno.EILSEQ


def test_an_incomplete_open_beside_a_passing_one_is_no_error(plain: Toy) -> None:
    (plain.mnt / "a").write_bytes(b"x" * 10000)
    with (plain.mnt / "a").open("r+b", buffering=0) as passing:
        os.rename(plain.mnt / "a", plain.mnt / "partial-a")
        with (plain.mnt / "partial-a").open("rb") as other:
            assert other.read() == b"x" * 10000
        passing.write(b"y")
    assert (plain.mnt / "partial-a").read_bytes()[:1] == b"y"


def test_the_mode_of_an_open_inode_never_changes(plain: Toy) -> None:
    (plain.mnt / "partial-a").write_bytes(b"x" * 10000)
    with (plain.mnt / "partial-a").open("rb") as cached:
        os.rename(plain.mnt / "partial-a", plain.mnt / "a")
        with (plain.mnt / "a").open("rb") as other:
            assert other.read() == cached.read() == b"x" * 10000
    wait_for(lambda: plain.counts()["RELEASE"] == 3)
    reads = plain.counts()["READ"]
    with (plain.mnt / "a").open("rb") as passing:
        assert passing.read() == b"x" * 10000
    assert plain.counts()["READ"] == (reads if plain.is_passing() else reads + 1)


def test_invalidation_makes_the_kernel_ask_again(sticky: Toy) -> None:
    path = sticky.mnt / "a"
    path.write_text("1")
    ino = path.stat().st_ino
    os.stat(path)
    before = sticky.counts()["LOOKUP"]
    os.stat(path)
    assert sticky.counts()["LOOKUP"] == before
    sticky.ask("inval-name 1 a")
    sticky.ask(f"inval-node {ino}")

    def asked_again() -> bool:
        os.stat(path)
        return sticky.counts()["LOOKUP"] > before

    wait_for(asked_again)


def test_an_idle_server_uses_no_cpu(plain: Toy) -> None:
    os.listdir(plain.mnt)
    before = plain.ask("cpu")
    time.sleep(1.0)
    assert plain.ask("cpu") - before < 0.02


def test_serve_ends_on_stop_and_on_unmount(tmp_path: Path) -> None:
    with mounted(tmp_path) as toy:
        os.listdir(toy.mnt)
        assert toy.ask("stop") == "stopping"
        assert toy.process.stdout is not None
        assert toy.process.stdout.readline() == '"served"\n'
        # The session is alive: a next server goes on with it.
        toy.take_over()
        os.mkdir(toy.mnt / "d")
        channel.unmount(str(toy.mnt))
        assert toy.process.stdout is not None
        assert toy.process.stdout.readline() == '"served"\n'


def test_an_abort_ends_the_session(tmp_path: Path) -> None:
    with mounted(tmp_path) as toy:
        os.listdir(toy.mnt)
        assert channel.connection_of(str(toy.mnt)) is not None
        holder = os.open(toy.mnt, os.O_RDONLY)
        channel.abort(str(toy.mnt))
        assert toy.process.stdout is not None
        assert toy.process.stdout.readline() == '"served"\n'
        with pytest.raises(OSError, match=_ANY):
            os.listdir(holder)
        os.close(holder)


# -- a new version of what is published


def published(toy: Toy, *, directory: bool) -> Path:
    """A published node that the kernel knows and believes for an hour."""
    path = toy.mnt / "published"
    if directory:
        path.mkdir()
        (path / "file").write_text("old")
        (path / "sub").mkdir()
        os.listdir(path)
        os.stat(path / "file")
    else:
        path.write_text("old content")
    toy.ask("publish published")
    os.stat(path)
    return path


def test_estale_at_open_reaches_the_new_node(sticky: Toy) -> None:
    path = published(sticky, directory=False)
    old = path.stat().st_ino
    with path.open("rb") as reader:
        for flags in (os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_CREAT):
            sticky.ask("publish published")
            os.stat(path)
            before = path.stat().st_ino
            fd = os.open(path, flags, 0o644)
            assert os.fstat(fd).st_ino != before
            os.write(fd, b"new")
            os.close(fd)
        assert reader.read() == b"old content"
        assert os.fstat(reader.fileno()).st_ino == old
    assert path.read_bytes() == b"new"
    assert sticky.ask("done").count("new-version") == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 3),
        lambda path: os.chmod(path, 0o600),
        lambda path: os.utime(path, (1, 1)),
        lambda path: os.chown(path, 1, 1),
    ],
    ids=["truncate", "chmod", "utime", "chown"],
)
def test_estale_at_a_change_by_path_reaches_the_new_node(sticky: Toy, change: Any) -> None:
    path = published(sticky, directory=False)
    before = path.stat().st_ino
    change(path)
    assert path.stat().st_ino != before
    assert sticky.ask("done").count("new-version") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "new").mkdir(),
        lambda path: (path / "new").write_text("x"),
        lambda path: (path / "file").unlink(),
        lambda path: (path / "sub").rmdir(),
        lambda path: os.rename(path / "file", path / "other"),
        lambda path: os.rename(path / "file", path.parent / "outside"),
        lambda path: os.symlink("x", path / "link"),
        lambda path: os.mknod(path / "node", 0o644),
    ],
    ids=["mkdir", "create", "unlink", "rmdir", "rename", "rename-out", "symlink", "mknod"],
)
def test_estale_at_a_change_in_a_directory_reaches_its_new_node(sticky: Toy, change: Any) -> None:
    path = published(sticky, directory=True)
    before = path.stat().st_ino
    change(path)
    assert path.stat().st_ino != before
    assert sticky.ask("done").count("new-version") == 1


# -- a server dies and another goes on


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_mkdir_that_a_killed_server_was_doing_happens_once(plain: Toy, when: str) -> None:
    """I10: a crash at any point and a restart reach the same result as no crash."""
    (plain.root / "stall").touch()
    path = plain.mnt / f"stall-{when}-dir"
    # mkdir of a process of its own: this one must stay able to unmount.
    maker = subprocess.Popen([sys.executable, "-c", f"import os; os.mkdir({str(path)!r})"])
    wait_for(lambda: plain.counts().get("LOOKUP", 0) >= 1)
    if when == "after":
        wait_for(lambda: f"make {path.name}" in plain.ask("done"))
        assert plain.counts()["MKDIR"] == 1
    plain.kill()
    (plain.root / "stall").unlink()
    assert maker.poll() is None
    plain.process = plain.start(resume=True)
    assert maker.wait(10) == 0
    assert path.is_dir()
    assert plain.ask("done").count(f"make {path.name}") == 1


def test_a_killed_server_ends_while_an_invalidation_waits_for_a_request(plain: Toy) -> None:
    """I10: the kernel holds the sender, deaf to SIGKILL, until its successor answers the mkdir."""
    (plain.root / "stall").touch()
    path = plain.mnt / "stall-after-dir"
    maker = subprocess.Popen([sys.executable, "-c", f"import os; os.mkdir({str(path)!r})"])
    wait_for(lambda: f"make {path.name}" in plain.ask("done"))
    plain.ask("inval-name 1 other")
    time.sleep(0.2)  # until the kernel has it
    plain.process.kill()
    plain.process.wait(5)
    plain.kill()
    (plain.root / "stall").unlink()
    plain.process = plain.start(resume=True)
    assert maker.wait(10) == 0
    assert path.is_dir()


def test_a_create_that_a_killed_server_had_done_gets_its_handle(plain: Toy) -> None:
    (plain.root / "stall").touch()
    path = plain.mnt / "stall-after-file"
    program = f"f = open({str(path)!r}, 'xb'); f.write(b'content'); f.close()"
    maker = subprocess.Popen([sys.executable, "-c", program])
    wait_for(lambda: f"make {path.name}" in plain.ask("done"))
    plain.kill()
    (plain.root / "stall").unlink()
    plain.process = plain.start(resume=True)
    assert maker.wait(10) == 0
    assert path.read_bytes() == b"content"
    assert plain.ask("done").count(f"make {path.name}") == 1
    assert "request-replayed" in plain.log()


@pytest.mark.parametrize("passthrough", [True, False])
def test_open_files_and_waiting_calls_survive_a_kill(
    tmp_path: Path, passthrough: bool, client: Client, other_client: Client
) -> None:
    """I11: nothing acknowledged is lost by kill -9."""
    with mounted(tmp_path, passthrough=passthrough) as toy:
        path, mnt = toy.mnt / "big", str(toy.mnt)
        client.run(f"mnt = {mnt!r}; f = open(mnt + '/big', 'w+b', buffering=0)")
        client.run("os.mkdir(mnt + '/other'); listing = os.open(mnt, os.O_RDONLY)")
        assert client.run("f.write(b'a' * 1000)") == 1000
        is_passing = passthrough and toy.is_passing()
        toy.kill()
        if is_passing:
            assert client.run("f.write(b'b' * 1000)") == 1000
        client.begin("os.listdir(mnt + '/other')")
        other_client.begin(f"os.mkdir({mnt!r} + '/made')")
        assert client.is_waiting()
        assert other_client.is_waiting()
        toy.process = toy.start(resume=True)
        assert client.end() == []
        assert other_client.end() is None
        # The same backing id, or the same cached mode: no EIO.
        client.run("again = open(mnt + '/big', 'r+b', buffering=0)")
        assert client.run("len(again.read())") == (2000 if is_passing else 1000)
        assert client.run("f.write(b'c' * 1000)") == 1000
        assert client.run("os.fsync(f.fileno())") is None
        assert client.run("os.ftruncate(f.fileno(), 1500)") is None
        assert client.run("os.fstat(f.fileno()).st_size") == 1500
        assert client.run("sorted(os.listdir(listing))") == ["big", "made", "other"]
        assert client.run("[os.close(listing), f.close(), again.close()]") == [None] * 3
        assert path.read_bytes() == b"a" * 1000 + (b"b" if is_passing else b"c") * 500
        counts = toy.counts()
        if is_passing:
            assert counts.get("WRITE", 0) == counts.get("READ", 0) == 0
        # All closed: another mode is possible again.
        wait_for(lambda: os.path.getsize(toy.root / "session.opens") % 40 == 0)


def test_without_the_list_of_open_files_a_successor_is_careful(plain: Toy, client: Client) -> None:
    path = plain.mnt / "big"
    client.run(f"f = open({str(path)!r}, 'w+b', buffering=0)")
    client.run("f.write(b'a' * 1000)")
    is_passing = plain.is_passing()
    plain.take_over(forget_opens=True)
    assert client.run("f.write(b'b')") == 1
    (plain.mnt / "new").write_bytes(b"new")
    assert (plain.mnt / "new").read_bytes() == b"new"
    if is_passing:
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
    client.run("f.close()")
    assert path.read_bytes() == b"a" * 1000 + b"b"
    assert "passthrough-off reason=open-files-unknown" in plain.log()


def test_writing_goes_on_through_ten_kills(plain: Toy) -> None:
    path = plain.mnt / "steady"
    program = (
        "import os, sys\n"
        f"f = open({str(path)!r}, 'wb', buffering=0)\n"
        "for i in range(2000):\n"
        "    f.write(b'%08d' % i)\n"
        "    if i % 100 == 0: os.stat(sys.argv[1]); os.makedirs(sys.argv[1] + '/d%d' % i)\n"
        "    if i % 100 == 0: print(i, flush=True)\n"
        "f.close()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(plain.mnt)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(10):
        writer.stdout.readline()
        plain.take_over()
    for _ in writer.stdout:
        pass
    assert writer.wait(20) == 0
    writer.stdout.close()
    assert path.read_bytes() == b"".join(b"%08d" % number for number in range(2000))
    assert len(os.listdir(plain.mnt)) == 21


# -- without rights


def test_without_the_right_to_pass_through_the_server_moves_the_bytes(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        lacking("no setpriv")
    with mounted(tmp_path, is_unprivileged=True) as toy:
        for name in ("a", "b"):
            (toy.mnt / name).write_bytes(b"x" * 100_000)
            assert (toy.mnt / name).read_bytes() == b"x" * 100_000
        assert toy.ask("passthrough") == "off: EPERM"
        assert toy.log().count("passthrough-off reason=EPERM") == 1
        assert toy.counts()["WRITE"] >= 2


@pytest.mark.skipif(not os.access("/sys/class/bdi", os.W_OK), reason="needs a writable /sys")
def test_what_does_not_pass_through_is_read_in_large_requests(tmp_path: Path) -> None:
    """The kernel's own default asks for 128 KiB at once."""
    if shutil.which("setpriv") is None:
        lacking("no setpriv")
    with mounted(tmp_path, is_unprivileged=True) as toy:
        data = os.urandom(8 << 20)
        (toy.mnt / "f").write_bytes(data)
        assert (toy.mnt / "f").read_bytes() == data
        assert 8 <= toy.counts()["READ"] <= 12


def test_an_unprivileged_server_mounts_with_the_helper(tmp_path: Path) -> None:
    """By fusermount3, where the kernel refuses mount(2)."""
    need_mount()
    mnt = tmp_path / "helper"
    mnt.mkdir()
    fd = channel._mount_by_helper(str(mnt), MountOptions(fsname="a,b"))
    try:
        lines = [
            line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if str(mnt) in line
        ]
        assert "fuse.ckptgate" in lines[-1]
        assert "a,b" in lines[-1]
    finally:
        channel.unmount(str(mnt), lazy=True)
        os.close(fd)
