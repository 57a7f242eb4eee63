"""How one supervisor gives a mount to the next: what is asked, given, refused and said last."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.app import succession
from ckptgate.app.config import Config
from ckptgate.app.keeping import Held
from ckptgate.app.succession import (
    HURRIED_S,
    TAKEOVER_S,
    Door,
    Predecessor,
    Successor,
    check_same,
)
from ckptgate.errors import BusyError, CkptError, RefusedError, UnusableError
from ckptgate_adapters.channels import RemoteError, address_in, bind_in


def config(tmp_path: Path, **more: str) -> Config:
    values = {"store": "/store", "mountpoint": "/mnt", "spool": str(tmp_path)}
    return Config(**(values | more))  # type: ignore[arg-type]


class Old:
    """The present supervisor: answers one request on a thread."""

    def __init__(self, tmp_path: Path, *, refuses: bool = False) -> None:
        self.config = config(tmp_path)
        self.door = Door(str(tmp_path))
        self.refuses = refuses
        self.files = [os.open(tmp_path, os.O_RDONLY) for _ in range(2)]
        self.keeper, self.theirs = socket.socketpair()
        self.successor: Successor | None = None
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self) -> None:
        self.successor = self.door.let_in(self._give, self.config)

    def _give(self) -> Held:
        if self.refuses:
            raise BusyError("not now")
        return Held(device=self.files[0], lock=self.files[1], keeper=self.keeper)

    def end(self) -> None:
        self.thread.join(10)
        self.door.close()
        for fd in self.files:
            os.close(fd)
        self.keeper.close()
        self.theirs.close()


def test_the_next_one_gets_copies_and_says_when_it_has_taken_over(tmp_path: Path) -> None:
    old = Old(tmp_path)
    new = Predecessor(config(tmp_path))
    old.thread.join(10)
    held = new.held
    assert held.keeper is not None
    held.keeper.send(b"hello")
    assert old.theirs.recv(10) == b"hello"
    for copy, mine in ((held.device, old.files[0]), (held.lock, old.files[1])):
        assert os.path.samestat(os.fstat(copy), os.fstat(mine))
        assert copy != mine
        assert not os.get_inheritable(copy)
        os.close(copy)
    held.keeper.close()
    assert old.successor is not None
    new.taken()
    assert old.successor.end()
    old.end()


def test_one_that_dies_before_its_last_word_has_not_taken_over(tmp_path: Path) -> None:
    old = Old(tmp_path)
    new = Predecessor(config(tmp_path))
    old.thread.join(10)
    new._connection.close()
    assert old.successor is not None
    assert not old.successor.end()
    for fd in (new.held.device, new.held.lock):
        os.close(fd)
    assert new.held.keeper is not None
    new.held.keeper.close()
    old.end()


@pytest.mark.parametrize("key", ["store", "mountpoint"])
def test_another_mount_is_refused(tmp_path: Path, key: str) -> None:
    old = Old(tmp_path)
    with pytest.raises(RemoteError, match=f"has the {key}") as caught:
        Predecessor(config(tmp_path, **{key: "/other"}))
    assert caught.value.exit_code == RefusedError.exit_code
    old.end()
    assert old.successor is None
    with pytest.raises(RefusedError, match="has the spool"):
        check_same(config(tmp_path), config(tmp_path, spool="/other"))


def test_who_is_second_is_told_so(tmp_path: Path) -> None:
    old = Old(tmp_path, refuses=True)
    with pytest.raises(RemoteError, match="not now") as caught:
        Predecessor(config(tmp_path))
    assert caught.value.exit_code == BusyError.exit_code
    old.end()


def test_without_a_supervisor_nothing_is_given(tmp_path: Path) -> None:
    with pytest.raises(UnusableError, match="does not answer"):
        Predecessor(config(tmp_path))


DEEP = b"[" * 30_000 + b"]" * 30_000
NONSENSE = [
    b"", b"{", b"[]", b"{}", b'{"protocol": 99}', b"\xff", b"taken", DEEP,
    b'{"protocol": 1, "spool": ' + DEEP[:60_000],
    b'{"protocol": true}', b'{"protocol": 1e400}', b'{"protocol": 1, "mountpoint": {}}',
    b'{"protocol": 1, "mountpoint": "\\ud800"}', b'{"protocol": 1}' + b" " * 70_000,
]  # fmt: skip


@pytest.mark.parametrize("request_bytes", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_answered_by_nothing_and_ends_nothing(
    tmp_path: Path, request_bytes: bytes
) -> None:
    """I13: of another release, or of nobody who should ask."""
    old = Old(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        with address_in(str(tmp_path), "supervisor.sock") as address:
            other.connect(address)
        if request_bytes:
            other.send(request_bytes)
        else:
            other.shutdown(socket.SHUT_WR)
        answer, fds, _, _ = socket.recv_fds(other, 4096, 4)
        assert not fds
        assert not answer or b"error" in answer
    old.end()
    assert old.successor is None


def refused(message: bytes, pid: int = 1, uid: int | None = None) -> str:
    """Why a message is refused."""
    running = Config(store="/store", mountpoint="/mnt", spool="/spool")

    def give() -> Held:
        raise AssertionError("it got something")

    with pytest.raises(CkptError) as caught:
        succession._asked(message, pid, os.geteuid() if uid is None else uid, give, running)
    return str(caught.value)


@given(st.one_of(
    st.binary(max_size=300),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: json.dumps(value).encode()),
    st.dictionaries(
        st.sampled_from(["protocol", "mountpoint", "store", "spool"]),
        st.integers(-1, 2) | st.text(max_size=3) | st.none(),
    ).map(lambda value: json.dumps(value).encode()),
))  # fmt: skip
def test_whatever_is_asked_with_gets_nothing_but_a_reason(message: bytes) -> None:
    """I13."""
    assert refused(message)


def test_paths_may_be_no_utf_8() -> None:
    odd = Config(store="/store", mountpoint="/m\udcff", spool="/spool")
    message = json.dumps({"protocol": 1, "mountpoint": "/m\udcff", "store": "/store",
                          "spool": "/spool"}).encode()  # fmt: skip
    held = Held(device=1, lock=2)
    assert succession._asked(message, 1, os.geteuid(), lambda: held, odd) is held


def test_who_has_no_number_here_or_is_another_user_gets_nothing() -> None:
    """Signals to process 0 would go to the supervisor itself, and to its children."""
    good = json.dumps(
        {"protocol": 1, "mountpoint": "/mnt", "store": "/store", "spool": "/spool"}
    ).encode()
    assert "its own user" in refused(good, pid=0)
    assert "its own user" in refused(good, uid=os.geteuid() + 1)


class Next:
    """A process that is to be the next supervisor, and the present one's view of it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.process = subprocess.Popen(["sleep", "600"])
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.seen = Successor(ours, os.pidfd_open(self.process.pid), lambda: self.now)

    def close(self) -> None:
        self.theirs.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def following() -> Iterator[Next]:
    made = Next()
    yield made
    made.close()


def test_a_next_one_that_is_stuck_is_killed_in_time_and_sooner_after_a_signal(
    following: Next,
) -> None:
    """SIGSTOP in the middle of a takeover keeps nobody waiting for ever."""
    seen = following.seen

    def pause() -> float | None:
        return seen.pause_s

    assert pause() == TAKEOVER_S
    seen.kill_if_late()
    seen.hurry()
    assert pause() == HURRIED_S
    following.now += HURRIED_S - 1
    seen.hurry()
    seen.kill_if_late()
    assert pause() == 1
    assert following.process.poll() is None
    os.kill(following.process.pid, signal.SIGSTOP)
    following.now += 1
    seen.kill_if_late()
    assert following.process.wait(10) == -signal.SIGKILL
    assert pause() is None
    # Its last word came too late: two supervisors must not be.
    following.theirs.send(b"taken")
    assert not seen.end()
    assert seen.is_hurried


def test_a_signal_goes_on_to_who_has_taken_over(following: Next) -> None:
    following.seen.hurry()
    following.theirs.send(b"taken")
    assert following.seen.end()
    assert following.process.wait(10) == -signal.SIGTERM


def test_without_a_signal_who_has_taken_over_gets_none(following: Next) -> None:
    following.theirs.send(b"taken")
    assert following.seen.end()
    assert following.process.poll() is None


REPLIES = [
    (b"", 2), (b"\xff", 2), (b"[]", 2), (b"{}", 0), (b'{"protocol": 1}', 1), (DEEP, 2),
    (b'{"error": {}}', 0), (b'{"error": {"kind": "x", "message": "m", "errno": 5}}', 2),
    (b'{"error": 3}', 2),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "count"), REPLIES, ids=range(len(REPLIES)))
def test_an_answer_that_makes_no_sense_is_an_error_and_leaves_no_descriptor(
    tmp_path: Path, reply: bytes, count: int
) -> None:
    """I13: of another release."""
    listening = bind_in(socket.SOCK_SEQPACKET, str(tmp_path), "supervisor.sock")
    listening.listen()
    given = [os.open(tmp_path, os.O_RDONLY) for _ in range(count)]

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            if reply:
                socket.send_fds(connection, [reply], given)

    thread = threading.Thread(target=answer)
    thread.start()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CkptError):
        Predecessor(config(tmp_path))
    thread.join(10)
    assert len(os.listdir("/proc/self/fd")) <= before
    listening.close()
    for fd in given:
        os.close(fd)
