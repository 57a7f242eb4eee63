"""Processes, threads, forks, copies; and clients that are wrong or hostile."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import msgspec
import pytest
from tests.e2e.harness import until

from ckptgate_adapters.fsspec_ckpt import messages, wire
from ckptgate_adapters.fsspec_ckpt.messages import VERSION


def test_file_systems_with_equal_options_are_one_and_go_through_pickles(place, fs, run):
    assert place.fs() is fs
    again = pickle.loads(pickle.dumps(fs))
    assert again == fs
    again.pipe(f"{run}/a.txt", b"a")
    assert fs.cat(f"{run}/a.txt") == b"a"
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()) == fs


def test_a_fresh_interpreter_knows_the_protocol(place, run):
    """By its entry point and the environment alone."""
    code = """
import sys, fsspec
with fsspec.open(f"ckpt://{sys.argv[1]}/a.txt", "w") as file:
    file.write("a")
fs, path = fsspec.core.url_to_fs(f"ckpt://{sys.argv[1]}/a.txt")
print(fs.cat(path), fs.unstrip_protocol(path))
"""
    done = place.python(code, run)
    assert done.stdout == f"b'a' ckpt://{run}/a.txt\n", done.stderr


def _in_child(fs, run, name, results):
    fs.pipe(f"{run}/step-1/{name}", name.encode())
    results.put(fs.cat(f"{run}/step-1/{name}"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_children_have_clients_of_their_own(fs, run, method):
    context = multiprocessing.get_context(method)
    results = context.Queue()
    with fs.open(f"{run}/step-1/parent.bin", "wb") as file:
        file.write(b"before")
        child = context.Process(target=_in_child, args=(fs, run, "child.bin", results))
        child.start()
        assert results.get(timeout=60) == b"child.bin"
        child.join(60)
        assert child.exitcode == 0
        file.write(b" and after")
    assert fs.cat(f"{run}/step-1/parent.bin") == b"before and after"
    assert len(fs.ls(f"{run}/step-1")) == 2


def test_a_forked_childs_end_says_nothing_of_its_parents_file(fs, run):
    file = fs.open(f"{run}/step-1/a.bin", "wb")
    file.write(b"a")
    file.flush()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            file.close()
        os._exit(0)
    os.waitpid(pid, 0)
    file.write(b"b")
    file.close()
    assert fs.cat(f"{run}/step-1/a.bin") == b"ab"


def test_many_threads_share_one_file_system(fs, run):
    def one(number: int) -> bytes:
        path = f"{run}/step-1/f{number}"
        fs.pipe(path, str(number).encode())
        return fs.cat(path)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(100))) == [str(n).encode() for n in range(100)]
    assert len(fs.ls(f"{run}/step-1")) == 100


def test_a_wait_of_one_thread_keeps_no_other_from_working(fs, run):
    fs.pipe(f"{run}/step-1/a.bin", b"a")
    waiting = threading.Thread(target=fs.wait, args=(f"{run}/step-1", 60))
    waiting.start()
    fs.pipe(f"{run}/step-1/b.bin", b"b")
    fs.commit(f"{run}/step-1")
    waiting.join(60)
    assert not waiting.is_alive()


def test_no_descriptor_is_left_behind(place, fs, run):
    fs.pipe(f"{run}/step-1/a.bin", b"a")

    def work() -> None:
        for _ in range(30):
            fs.cat(f"{run}/step-1/a.bin")
            fs.pipe(f"{run}/step-1/b.bin", b"b")
            fs.ls(f"{run}/step-1")
            with pytest.raises(FileNotFoundError):
                fs.open(f"{run}/step-1/none")
            with contextlib.suppress(KeyError), fs.open(f"{run}/step-1/c.bin", "wb"):
                raise KeyError

    work()
    gc.collect()
    daemon = place.child("clients")
    before = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{daemon}/fd"))
    work()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    until(
        "the daemon's descriptors",
        lambda: len(os.listdir(f"/proc/{daemon}/fd")) <= before[1] + 4,
    )


def test_a_large_directory_is_listed_whole(fs, run):
    for number in range(600):
        fs.touch(f"{run}/step-1/{'n' * 60}-{number}")
    assert len(fs.ls(f"{run}/step-1", detail=False)) == 600


def _connected(place) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    with wire.address(str(place.spool)) as short:
        sock.connect(short)
    return sock


def _hello(sock: socket.socket, **words) -> messages.Reply:
    hello = messages.Hello(version=VERSION, session="0" * 32)
    sock.send(wire.encode(msgspec.structs.replace(hello, **words)))
    return wire.decode_reply(sock.recv(1 << 17))


def test_the_socket_is_its_users_alone(place, fs):
    fs.ls("")
    mode = os.stat(place.spool / wire.CLIENT_SOCKET).st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert stat.S_IMODE(os.stat(place.spool).st_mode) == 0o700


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"x" * 90_000,
        b"\x80" * 100_000,
        wire.encode(messages.Stat(path="")),
        wire.encode(messages.Hello(version=VERSION, session="short")),
        wire.encode(messages.Hello(version=VERSION, session="z" * 32)),
        wire.encode(messages.Hello(version=VERSION, session="0" * 32, rank=5, world_size=2)),
        wire.encode(messages.Hello(version=VERSION, session="0" * 32, job="nonsense")),
    ],
    ids=["no message", "long", "too long", "no hello", "short", "no hex", "no rank", "no job"],
)
def test_nonsense_ends_a_connection_and_nothing_else(place, fs, data):
    fs.ls("")
    before = place.child("clients")
    with _connected(place) as sock:
        sock.send(data)
        assert sock.recv(100) == b""
    assert fs.ls("") is not None
    assert place.child("clients") == before


def test_another_version_is_told_so(place, fs):
    fs.ls("")
    with _connected(place) as sock:
        reply = _hello(sock, version=99)
    assert isinstance(reply, messages.Failed)
    assert "version" in reply.message


@pytest.mark.parametrize(
    "request_",
    [
        messages.Stat(path="../etc/passwd"),
        messages.Stat(path="/etc/passwd"),
        messages.Stat(path="a//b"),
        messages.Stat(path="a\0b"),
        messages.Open(id=1, path="x", flags=os.O_RDWR | os.O_CREAT | os.O_TMPFILE),
        messages.Open(id=1, path=".ckptgate/x", flags=os.O_RDWR | os.O_CREAT),
        messages.Open(id=1, path="", flags=os.O_RDWR),
        messages.Close(id=2, fh=1 << 40),
        messages.Ensure(fh=7, offset=-5, length=1 << 62),
        messages.Read(fh=7, offset=0, length=1 << 40),
        messages.Reopen(fh=3),
        messages.SetXattr(id=3, path="", name="user.ckptgate.commit", value=b"5/2"),
        messages.SetXattr(id=3, held=12345, name="user.a", value=b""),
        messages.Rename(id=4, path="none", to="", flags=99),
        messages.SetAttrs(id=5, path="none", size=-1),
        messages.Hello(version=VERSION, session="1" * 32),
    ],
    ids=lambda request: ascii(request)[:60],
)
def test_what_can_not_be_is_an_error_of_that_request(place, fs, request_):
    fs.ls("")
    with _connected(place) as sock:
        assert isinstance(_hello(sock), messages.Told)
        sock.send(wire.encode(request_))
        assert isinstance(wire.decode_reply(sock.recv(1 << 17)), messages.Failed)
        sock.send(wire.encode(messages.Stat(path="")))
        assert isinstance(wire.decode_reply(sock.recv(1 << 17)), messages.Told)


def test_descriptors_that_a_client_sends_are_not_kept(place, fs):
    fs.ls("")
    daemon = place.child("clients")
    with _connected(place) as sock, open("/dev/null", "rb") as null:
        _hello(sock)
        before = len(os.listdir(f"/proc/{daemon}/fd"))
        for _ in range(50):
            wire.send(sock, wire.encode(messages.Stat(path="")), null.fileno())
            sock.recv(1 << 17)
        assert len(os.listdir(f"/proc/{daemon}/fd")) <= before + 2


def test_clients_that_never_say_hello_keep_nobody_out(place, fs):
    fs.ls("")
    silent = [_connected(place) for _ in range(100)]
    try:
        assert fs.ls("") is not None
    finally:
        for sock in silent:
            sock.close()


def test_another_process_can_not_take_over_a_session(place, fs, run):
    """A session is its process's; whoever knows its id is refused, and hurts nobody."""
    fs.ls("")
    session = fs.client._session
    code = """
import socket, sys
from ckptgate_adapters.fsspec_ckpt import messages, wire
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
with wire.address(sys.argv[1]) as short:
    sock.connect(short)
sock.send(wire.encode(messages.Hello(version=messages.VERSION, session=sys.argv[2])))
print(sock.recv(100))
"""
    done = place.python(code, str(place.spool), session)
    assert done.stdout == "b''\n", done.stderr
    assert fs.ls("") is not None
