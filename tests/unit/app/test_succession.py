"""How one supervisor gives a mount to the next: what is asked, given, refused and said last."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from ckptgate.app.config import Config
from ckptgate.app.keeping import Held
from ckptgate.app.succession import Door, Predecessor, Successor, check_same
from ckptgate.errors import BusyError, RefusedError, UnusableError
from ckptgate_adapters.channels import RemoteError, address_in


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
    for given, mine in ((held.device, old.files[0]), (held.lock, old.files[1])):
        assert os.path.samestat(os.fstat(given), os.fstat(mine))
        assert given != mine
        assert not os.get_inheritable(given)
        os.close(given)
    held.keeper.close()
    assert old.successor is not None
    new.taken()
    assert old.successor.has_taken()
    old.end()


def test_one_that_dies_before_its_last_word_has_not_taken_over(tmp_path: Path) -> None:
    old = Old(tmp_path)
    new = Predecessor(config(tmp_path))
    old.thread.join(10)
    new._connection.close()
    assert old.successor is not None
    assert not old.successor.has_taken()
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


@pytest.mark.parametrize("request_bytes", [b"", b"{", b"[]", b"{}", b'{"protocol": 99}', b"\xff"])
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
