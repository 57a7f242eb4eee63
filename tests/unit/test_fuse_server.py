"""The FUSE server on a socket instead of a device: raw requests in, raw replies out."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptgate.errors import (
    FormatVersionError,
    TransientStoreError,
    UnusableError,
    WouldBlockError,
)
from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Attr, Caller, DirEntry, Entry, Opened
from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.opens import Backing, BackingTable
from ckptgate_adapters.fuse.pool import Pool
from ckptgate_adapters.fuse.server import FuseServer
from ckptgate_adapters.fuse.session import FuseSession
from ckptgate_adapters.fuse.wire import InitFlag, Opcode, OpenFlag

RESENT = 1 << 63
INIT_BODY = struct.pack("<IIIIII", 7, 45, 1 << 17, 0xFFFFFFFF, 0xFFFFFFFF, 0) + bytes(40)


def attr(ino: int, kind: NodeKind = NodeKind.FILE) -> Attr:
    return Attr(ino, kind, 0o644, 1, 0, 0, 0, 0, 0, 0, 0)


READING_FH = 77


class ScriptedFs:
    """Answers a few calls and notes them; what it has no method for is an AttributeError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[str] = []
        self.kept: dict[int, bytes] = {}
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.must = False
        self.is_unregistered = False
        self.fh = 10

    @contextlib.contextmanager
    def atomic(self, caller: Caller) -> Iterator[None]:
        yield

    def replay(self, caller: Caller) -> bytes | None:
        assert caller.request is not None
        return self.kept.get(caller.request)

    def remember(self, caller: Caller, reply: bytes) -> None:
        assert caller.request is not None
        self.kept[caller.request] = reply

    def must_settle(self, ino: int, *, is_close: bool = False) -> bool:
        return self.must

    def settle(self, caller: Caller, ino: int, *, is_close: bool = False) -> None:
        self.calls.append(f"settle {ino}")
        self.gate.wait(10)
        if self.is_unregistered:
            raise TransientStoreError("not registered")

    def flush(self, caller: Caller, fh: int) -> bool:
        self.calls.append(f"flush {fh}")
        return fh != READING_FH

    def lookup(self, caller: Caller, parent: int, name: str) -> Entry:
        if name == "wait":
            if not caller.may_block:
                raise WouldBlockError(name)
            self.calls.append("begun")
            self.begun.release()
            self.gate.wait(10)
        if name == "busy":
            self.begun.release()
            self.gate.wait(10)
        if name == "sticky":
            raise OSError(errno.ENOSYS, name)
        if name == "no-errno":
            raise OSError(name)
        if name == "huge":
            raise OSError(99999, name)
        if name == "bug":
            raise KeyError(name)
        return Entry(attr(5), 1.0)

    def mkdir(self, caller: Caller, parent: int, name: str, mode: int) -> Entry:
        self.calls.append(f"mkdir {name}")
        return Entry(attr(6, NodeKind.DIR), 1.0)

    def open(self, caller: Caller, ino: int, flags: int) -> Opened:
        self.fh += 1
        self.calls.append(f"open {self.fh}")
        return Opened(self.fh, os.open(self.path, os.O_RDWR), is_complete=True)

    def reopen(self, fh: int) -> Opened | None:
        self.calls.append(f"reopen {fh}")
        return Opened(fh, os.open(self.path, os.O_RDWR), is_complete=True) if fh < 1000 else None

    def release(self, fh: int) -> None:
        self.calls.append(f"release {fh}")

    def opendir(self, caller: Caller, ino: int) -> int:
        return 77

    def readdir(
        self, caller: Caller, fh: int, cookie: int, *, with_entries: bool = True
    ) -> list[DirEntry]:
        names = [".", "..", "aaa", "unseen", "bbb"][cookie:]
        return [
            DirEntry(name, number, NodeKind.FILE, number,
                     None if name == "unseen" else Entry(attr(100 + number), 1.0))
            for number, name in enumerate(names, cookie + 1)
        ]  # fmt: skip

    def looked_up(self, nodes: list[int]) -> None:
        self.calls.append(f"looked up {nodes}")

    def forget(self, nodes: list[tuple[int, int]]) -> None:
        self.calls.append(f"forget {nodes}")


class Device:
    """The kernel's side."""

    def __init__(self, fs: ScriptedFs, session: FuseSession, kernel: socket.socket) -> None:
        self.kernel = kernel
        self.fs = fs
        self.session = session
        self.server = FuseServer(fs, session, patience_s=0.2)  # type: ignore[arg-type]
        self.outcome: list[bool] = []
        self.thread = threading.Thread(target=lambda: self.outcome.append(self.server.serve()))
        self.thread.start()

    def send(self, opcode: int, body: bytes = b"", *, unique: int = 2, node: int = 1) -> None:
        header = wire.IN_HEADER.pack(40 + len(body), opcode, unique, node, 0, 0, 1, 0, 0)
        self.kernel.send(header + body)

    def receive(self) -> tuple[int, int, bytes]:
        """(errno, unique, body)."""
        raw = self.kernel.recv(1 << 21)
        size, error, unique = wire.OUT_HEADER.unpack_from(raw)
        assert size == len(raw)
        return -error, unique, raw[16:]

    def ask(self, opcode: int, body: bytes = b"", *, unique: int = 2, node: int = 1):
        self.send(opcode, body, unique=unique, node=node)
        error, answered, reply = self.receive()
        assert answered == unique
        return error, reply


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel.settimeout(10)
    session = FuseSession(ours.fileno(), state_path=str(tmp_path / "session"))
    device = Device(ScriptedFs(path), session, kernel)
    yield device
    device.fs.gate.set()
    device.server.stop()
    device.thread.join(10)
    assert not device.thread.is_alive()
    kernel.close()
    ours.close()


def test_init_agrees_on_what_both_can_and_on_nothing_else(device: Device) -> None:
    error, reply = device.ask(Opcode.INIT, INIT_BODY)
    fields = wire.INIT_OUT.unpack(reply)
    assert error == 0
    assert fields[:2] == (7, 45)
    flags = fields[3] | fields[10] << 32
    assert flags & InitFlag.PASSTHROUGH
    assert flags & InitFlag.HANDLE_KILLPRIV_V2
    write_back, posix_locks, flock, posix_acl = 1 << 16, 1 << 1, 1 << 10, 1 << 20
    assert not flags & (write_back | posix_locks | flock | posix_acl)
    assert (fields[6], fields[8], fields[11]) == (1 << 20, 256, 1)
    state = (Path(device.session.state_path or "")).read_bytes()
    assert FuseSession.from_state(0, state).negotiated == device.session.negotiated


def test_a_kernel_that_is_too_old_is_refused(tmp_path: Path) -> None:
    session = FuseSession(0)
    with pytest.raises(UnusableError, match=r"fuse 7\.23"):
        session.accept(struct.pack("<IIII", 7, 23, 0, 0), passthrough=True)
    with pytest.raises(UnusableError, match="not valid"):
        FuseSession.from_state(0, b"{")


def test_the_state_of_another_release_is_refused_by_its_version(device: Device) -> None:
    """I13: whatever else it says."""
    device.ask(Opcode.INIT, INIT_BODY)
    state = json.loads(device.session.state())
    for other in ({**state, "version": 2}, {"version": 2, "everything": "is new"}):
        with pytest.raises(FormatVersionError, match="version 2, not 1"):
            FuseSession.from_state(0, json.dumps(other).encode())
    with pytest.raises(UnusableError, match="not valid"):
        FuseSession.from_state(0, json.dumps({**state, "more": 1}).encode())


def without_resend(device: Device) -> FuseSession:
    """Begin the session as on a kernel that sends nothing again; what a successor gets of it."""
    fields = list(struct.unpack_from("<IIIIII", INIT_BODY))
    fields[4] &= ~(InitFlag.HAS_RESEND >> 32)
    device.ask(Opcode.INIT, struct.pack("<IIIIII", *fields) + bytes(40))
    return FuseSession.resume(device.session.fd, device.session.state_path or "")


def test_where_nothing_is_sent_again_a_successor_of_a_killed_server_refuses(
    device: Device,
) -> None:
    """I10: whoever waits for what is lost would wait for ever."""
    session = without_resend(device)
    assert not session.is_settled
    server = FuseServer(device.fs, session)  # type: ignore[arg-type]
    with pytest.raises(UnusableError, match="is lost"):
        server.serve()


def test_where_nothing_is_sent_again_a_server_answers_all_before_it_ends(device: Device) -> None:
    """I10: it waits for what it is at, and its successor goes on."""
    without_resend(device)
    device.send(Opcode.LOOKUP, b"wait\0", unique=60)
    assert device.fs.begun.acquire(timeout=10)
    device.server.stop()
    device.thread.join(0.5)
    assert device.thread.is_alive()
    device.fs.gate.set()
    assert device.receive()[1] == 60
    device.thread.join(10)
    assert FuseSession.resume(0, device.session.state_path or "").is_settled


def test_a_server_that_is_stopped_does_not_wait_for_what_is_sent_again(device: Device) -> None:
    """I10: its process then ends as if it were killed."""
    device.ask(Opcode.INIT, INIT_BODY)
    device.send(Opcode.LOOKUP, b"wait\0", unique=60)
    assert device.fs.begun.acquire(timeout=10)
    device.server.stop()
    device.thread.join(10)
    assert not device.thread.is_alive()
    assert device.outcome == [False]
    # Not before its thread is done, which would else write to what is opened next.
    device.fs.gate.set()
    assert device.receive()[1] == 60


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bug", errno.EIO),
        ("no-errno", errno.EIO),
        ("huge", errno.EIO),
        ("sticky", errno.EOPNOTSUPP),
        ("fine", 0),
    ],
)
def test_whatever_a_handler_raises_the_caller_gets_a_true_errno(
    device: Device, name: str, expected: int
) -> None:
    assert device.ask(Opcode.LOOKUP, name.encode() + b"\0")[0] == expected
    assert device.ask(Opcode.LOOKUP, b"fine\0")[0] == 0


def test_torn_requests_and_unknown_opcodes_do_not_end_the_loop(device: Device) -> None:
    assert device.ask(4711)[0] == errno.ENOSYS
    assert device.ask(Opcode.GETATTR, b"")[0] == errno.EIO
    assert device.ask(Opcode.LOOKUP, b"no end")[0] == errno.EINVAL
    assert device.ask(Opcode.LINK)[0] == errno.EPERM
    assert device.ask(Opcode.IOCTL)[0] == errno.ENOTTY
    assert device.ask(Opcode.TMPFILE)[0] == errno.EOPNOTSUPP
    assert device.ask(Opcode.LOOKUP, b"fine\0")[0] == 0


def test_what_would_block_waits_on_the_pool_and_others_go_on(device: Device) -> None:
    device.send(Opcode.LOOKUP, b"wait\0", unique=100)
    assert device.ask(Opcode.LOOKUP, b"fine\0", unique=102)[0] == 0
    device.fs.gate.set()
    assert device.receive()[:2] == (0, 100)


def test_a_protocol_thread_that_is_busy_holds_up_nobody(device: Device) -> None:
    device.send(Opcode.LOOKUP, b"busy\0", unique=100)
    assert device.fs.begun.acquire(timeout=10)
    for unique in range(102, 112, 2):
        assert device.ask(Opcode.LOOKUP, b"fine\0", unique=unique)[0] == 0
    device.fs.gate.set()
    assert device.receive()[:2] == (0, 100)
    assert device.ask(Opcode.LOOKUP, b"fine\0", unique=120)[0] == 0


def open_file(device: Device) -> int:
    error, reply = device.ask(Opcode.OPEN, struct.pack("<II", os.O_RDWR, 0), unique=50, node=5)
    assert error == 0
    return struct.unpack_from("<Q", reply)[0]


def io(fh: int, offset: int, size: int, flags: int = 0) -> bytes:
    return wire.WRITE_IN.pack(fh, offset, size, flags, 0, 0, 0)


def test_bytes_are_read_and_written_at_their_place(device: Device) -> None:
    fh = open_file(device)
    error, reply = device.ask(Opcode.WRITE, io(fh, 3, 4) + b"abcd", unique=60, node=5)
    assert (error, wire.WRITE_OUT.unpack(reply)) == (0, (4, 0))
    assert device.ask(Opcode.READ, io(fh, 2, 6), unique=62, node=5) == (0, b"2abcd7")
    # To the kernel less than it asked for is the end of the file.
    assert device.ask(Opcode.READ, io(fh, 8, 6), unique=64, node=5) == (0, b"89")
    assert device.ask(Opcode.READ, io(fh, 10, 6), unique=66, node=5) == (0, b"")
    large = os.urandom(140 << 10)
    device.ask(Opcode.WRITE, io(fh, 0, len(large)) + large, unique=68, node=5)
    assert device.ask(Opcode.READ, io(fh, 0, len(large)), unique=70, node=5) == (0, large)


def test_a_write_that_fails_or_is_cut_off_never_writes_an_older_ones_bytes(device: Device) -> None:
    fh = open_file(device)
    device.ask(Opcode.WRITE, io(fh, 0, 4) + b"abcd", unique=60, node=5)
    error, reply = device.ask(Opcode.WRITE, io(fh, 4, 6) + b"ef", unique=62, node=5)
    assert (error, wire.WRITE_OUT.unpack(reply)) == (0, (2, 0))
    assert device.ask(Opcode.WRITE, io(fh, 0, 4)[:20], unique=64, node=5)[0] == errno.EIO
    assert device.ask(Opcode.READ, io(fh, 0, 4)[:8], unique=66, node=5)[0] == errno.EIO
    assert device.fs.path.read_bytes() == b"abcdef6789"
    assert device.ask(Opcode.WRITE, io(4711, 0, 1) + b"x", unique=68, node=5)[0] == errno.EBADF
    before = device.ask(Opcode.WRITE, io(fh, 1 << 63, 1) + b"x", unique=70, node=5)[0]
    assert before not in {0, errno.EBADF}


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_queued_request_is_answered_eintr_when_its_caller_is_interrupted(device: Device) -> None:
    for number in range(17):
        device.send(Opcode.LOOKUP, b"wait\0", unique=100 + 2 * number)
    assert device.ask(Opcode.LOOKUP, b"fine\0", unique=2)[0] == 0
    for _ in range(16):
        assert device.fs.begun.acquire(timeout=10)
    numbers = [100 + 2 * number for number in range(17)]
    until(lambda: any(map(device.server._looks.is_queued, numbers)))
    for unique in numbers:
        device.send(Opcode.INTERRUPT, struct.pack("<Q", unique), unique=unique | 1)
    # Sixteen have begun and go on; which one has not is a matter of threads.
    error, interrupted, _ = device.receive()
    assert (error, interrupted in numbers) == (errno.EINTR, True)
    device.fs.gate.set()
    finished = {device.receive()[:2] for _ in range(16)}
    assert finished == {(0, unique) for unique in numbers if unique != interrupted}


def test_a_request_whose_caller_gets_a_signal_is_done_all_the_same(device: Device) -> None:
    device.send(Opcode.INTERRUPT, struct.pack("<Q", 100), unique=101)
    device.send(Opcode.LOOKUP, b"wait\0", unique=100)
    assert device.fs.begun.acquire(timeout=10)
    device.send(Opcode.INTERRUPT, struct.pack("<Q", 100), unique=101)
    assert device.ask(Opcode.LOOKUP, b"fine\0", unique=102)[0] == 0
    device.fs.gate.set()
    assert device.receive()[:2] == (0, 100)


def test_a_mutation_that_is_sent_again_is_not_done_again(device: Device) -> None:
    """I10: a crash at any point and a restart reach the same result as no crash."""
    body = struct.pack("<II", 0o755, 0) + b"d\0"
    first = device.ask(Opcode.MKDIR, body, unique=50)
    again = device.ask(Opcode.MKDIR, body, unique=50 | RESENT)
    assert first == again
    assert device.fs.calls.count("mkdir d") == 1
    # The same number without the mark is another request: of another session.
    device.ask(Opcode.MKDIR, body, unique=52)
    assert device.fs.calls.count("mkdir d") == 2


def test_an_open_that_is_sent_again_gets_its_handle_again(device: Device) -> None:
    body = struct.pack("<II", os.O_WRONLY, 0)
    error, first = device.ask(Opcode.OPEN, body, unique=50, node=5)
    _, again = device.ask(Opcode.OPEN, body, unique=50 | RESENT, node=5)
    assert error == 0
    assert again == first
    assert device.fs.calls == ["open 11", "reopen 11"]


def test_a_reading_open_that_is_sent_again_leaves_no_handle_behind(device: Device) -> None:
    body = struct.pack("<II", os.O_RDONLY, 0)
    device.ask(Opcode.OPEN, body, unique=50, node=5)
    device.ask(Opcode.OPEN, body, unique=50 | RESENT, node=5)
    table = BackingTable(f"{device.session.state_path}.opens")
    assert list(table.inodes[5].handles) == [12]
    table.close()


def test_handles_of_a_previous_process_are_taken_over(device: Device) -> None:
    read = struct.pack("<QQIIQII", 500, 2, 4, 0, 0, 0, 0)
    assert device.ask(Opcode.READ, read, node=5) == (0, b"2345")
    write = struct.pack("<QQIIQII", 500, 0, 3, 0, 0, 0, 0) + b"abc"
    assert device.ask(Opcode.WRITE, write, node=5) == (0, struct.pack("<II", 3, 0))
    assert device.fs.path.read_bytes() == b"abc3456789"
    assert device.fs.calls == ["reopen 500"]
    unknown = struct.pack("<QQIIQII", 5000, 2, 4, 0, 0, 0, 0)
    assert device.ask(Opcode.READ, unknown, node=5)[0] == errno.EBADF
    assert device.ask(Opcode.RELEASE, struct.pack("<QIIQ", 5000, 0, 0, 0), node=5)[0] == 0


def test_settling_happens_after_the_mutation_and_before_the_reply(device: Device) -> None:
    device.fs.must = True
    device.send(Opcode.MKDIR, struct.pack("<II", 0o755, 0) + b"d\0", unique=50)
    assert device.ask(Opcode.LOOKUP, b"fine\0", unique=52)[0] == 0
    device.fs.gate.set()
    assert device.receive()[:2] == (0, 50)
    assert device.fs.calls == ["mkdir d", "settle 6"]


def flush_body(fh: int) -> bytes:
    return struct.pack("<QIIQ", fh, 0, 0, 0)


def test_only_close_may_fail_because_others_cannot_know_of_it(device: Device) -> None:
    """Other mutations are done, and their reply says so, whatever waiting for others came to."""
    device.fs.must = device.fs.is_unregistered = True
    device.fs.gate.set()
    assert device.ask(Opcode.FLUSH, flush_body(7), unique=50, node=6)[0] == errno.EIO
    assert device.fs.calls == ["flush 7", "settle 6"]
    mkdir = struct.pack("<II", 0o755, 0) + b"d\0"
    assert device.ask(Opcode.MKDIR, mkdir, unique=52)[0] == 0


def test_the_close_of_a_reader_waits_for_nobody(device: Device) -> None:
    device.fs.must = device.fs.is_unregistered = True
    assert device.ask(Opcode.FLUSH, flush_body(READING_FH), unique=50, node=6)[0] == 0
    assert device.fs.calls == [f"flush {READING_FH}"]


@pytest.mark.parametrize("room", [0, 31, 32, 63, 64, 96, 4096])
def test_readdir_never_gives_more_than_fits(device: Device, room: int) -> None:
    fh = wire.OPEN_OUT.unpack(device.ask(Opcode.OPENDIR, bytes(8))[1])[0]
    error, reply = device.ask(Opcode.READDIR, struct.pack("<QQIIQII", fh, 0, room, 0, 0, 0, 0))
    assert error == 0
    assert len(reply) == min(room // 32, 5) * 32


def test_readdirplus_counts_exactly_the_look_ups_that_it_sent(device: Device) -> None:
    fh = wire.OPEN_OUT.unpack(device.ask(Opcode.OPENDIR, bytes(8))[1])[0]
    read = struct.pack("<QQIIQII", fh, 0, 4 * 160, 0, 0, 0, 0)
    _, reply = device.ask(Opcode.READDIRPLUS, read)
    assert len(reply) == 4 * 160
    nodes = [struct.unpack_from("<Q", reply, 160 * number)[0] for number in range(4)]
    assert nodes == [0, 0, 103, 0]
    assert device.fs.calls == ["looked up [103]"]


def test_forgets_get_no_reply(device: Device) -> None:
    device.send(Opcode.FORGET, struct.pack("<Q", 3), node=9)
    device.send(Opcode.BATCH_FORGET, struct.pack("<IIQQQQ", 2, 0, 9, 1, 8, 2))
    assert device.ask(Opcode.LOOKUP, b"fine\0")[0] == 0
    expected = {"forget [(9, 3)]", "forget [(9, 1), (8, 2)]"}
    # Another thread may have taken one of them, and nobody waits for it.
    until(lambda: set(device.fs.calls) >= expected)
    assert set(device.fs.calls) == expected


def test_destroy_ends_the_loop(device: Device) -> None:
    assert device.ask(Opcode.DESTROY)[0] == 0
    device.thread.join(10)
    assert not device.thread.is_alive()


# -- open inodes


class Kernel:
    def __init__(self) -> None:
        self.open: set[int] = set()
        self.last = 0
        self.error = 0

    def register(self, fd: int) -> int:
        if self.error:
            raise OSError(self.error, "refused")
        self.last += 1
        self.open.add(self.last)
        return self.last


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def backing(kernel: Kernel, path: Path | None) -> Backing:
    table = BackingTable(None if path is None else str(path))
    made = Backing(table, register=kernel.register, unregister=kernel.open.discard)
    made.enable()
    return made


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[Opened]]:
    (tmp_path / "bytes").touch()
    fds = [os.open(tmp_path / "bytes", os.O_RDWR) for _ in range(4)]
    yield [Opened(number, fd, is_complete=number != 3) for number, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)


def test_one_backing_id_an_inode_until_its_last_release(
    kernel: Kernel, opened: list[Opened]
) -> None:
    made = backing(kernel, None)
    assert made.attach(5, opened[0], 0, 2) == (OpenFlag.PASSTHROUGH, 1)
    assert made.attach(5, opened[1], os.O_DIRECT, 4) == (
        OpenFlag.PASSTHROUGH | OpenFlag.DIRECT_IO,
        1,
    )
    assert made.attach(5, opened[3], 0, 6) == (OpenFlag.PASSTHROUGH | OpenFlag.DIRECT_IO, 1)
    for number in (0, 1):
        made.detach(5, number)
        assert kernel.open == {1}
    made.detach(5, 3)
    made.detach(5, 3)
    assert kernel.open == set()
    # Cached first: it stays cached.
    assert made.attach(5, opened[3], 0, 8) == (0, 0)
    assert made.attach(5, opened[0], 0, 10) == (0, 0)


def test_a_successor_knows_ids_and_closes_what_was_left(
    kernel: Kernel, opened: list[Opened], tmp_path: Path
) -> None:
    journal = tmp_path / "opens"
    first = backing(kernel, journal)
    first.attach(5, opened[0], 0, 2)
    first.attach(6, opened[1], 0, 4)
    first.close()
    # Killed between the journal and the ioctl, and in the middle of a record.
    table = BackingTable(str(journal))
    assert table.drop(6, 1) == 2
    table.close()
    with journal.open("ab") as file:
        file.write(b"torn")
    second = backing(kernel, journal)
    second.finish_closes()
    assert kernel.open == {1}
    assert second.attach(5, opened[1], 0, 6) == (OpenFlag.PASSTHROUGH, 1)
    second.detach(5, 0)
    second.detach(5, 1)
    assert kernel.open == set()
    second.close()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ELOOP, errno.EOPNOTSUPP])
def test_a_lasting_refusal_switches_passthrough_off_and_says_so_once(
    kernel: Kernel, opened: list[Opened], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = backing(kernel, None)
    kernel.error = number
    assert made.attach(5, opened[0], 0, 2) == (0, 0)
    assert made.attach(6, opened[1], 0, 4) == (0, 0)
    assert made.state == f"off: {errno.errorcode[number]}"
    assert caplog.text.count("passthrough-off") == 1


def test_a_passing_lack_does_not(kernel: Kernel, opened: list[Opened]) -> None:
    made = backing(kernel, None)
    kernel.error = errno.EMFILE
    assert made.attach(5, opened[0], 0, 2) == (0, 0)
    kernel.error = 0
    assert made.attach(6, opened[1], 0, 4)[0] == OpenFlag.PASSTHROUGH


def test_the_journal_stays_small(kernel: Kernel, opened: list[Opened], tmp_path: Path) -> None:
    made = backing(kernel, tmp_path / "opens")
    for _ in range(5000):
        made.attach(5, opened[0], 0, 2)
        made.detach(5, 0)
    assert (tmp_path / "opens").stat().st_size < 5000 * 40
    made.close()


def test_a_full_disk_costs_the_journal_and_no_open(
    kernel: Kernel, opened: list[Opened], tmp_path: Path
) -> None:
    made = backing(kernel, tmp_path / "opens")
    os.close(made._table._fd)
    made._table._fd = os.open("/dev/full", os.O_WRONLY)
    assert made.attach(5, opened[0], 0, 2)[0] == OpenFlag.PASSTHROUGH
    assert not (tmp_path / "opens").exists()


def test_a_pool_grows_only_as_far_as_allowed() -> None:
    pool, gate = Pool(2), threading.Event()
    done: list[int] = []

    def job(number: int) -> None:
        gate.wait(10)
        done.append(number)

    for number in range(5):
        pool.submit(number, functools.partial(job, number))
    assert pool._threads == 2
    assert pool.cancel(4)
    # A signal while it is on its way is no reason to fail.
    assert not pool.cancel(5)
    pool.submit(5, functools.partial(job, 5))
    assert pool.is_queued(5)
    gate.set()
    assert pool.close(10)
    assert not pool.is_queued(5)
    assert sorted(done) == [0, 1, 2, 3, 5]


def test_a_backing_id_that_cannot_be_closed_holds_nothing_up(tmp_path: Path):
    """I10: the file is released nevertheless, and a successor tries again."""
    path = str(tmp_path / "opens")
    opened_fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)

    def refuse(backing_id: int) -> None:
        raise OSError(errno.EIO, f"injected for {backing_id}")

    backing = Backing(BackingTable(path), register=lambda fd: 7, unregister=refuse)
    backing.enable()
    backing.attach(3, Opened(fh=1, fd=opened_fd, is_complete=True), 0, 1)
    backing.detach(3, 1)
    backing.close()
    closed: list[int] = []
    successor = Backing(BackingTable(path), register=lambda fd: 8, unregister=closed.append)
    successor.finish_closes()
    assert closed == [7]
    successor.close()
    os.close(opened_fd)
