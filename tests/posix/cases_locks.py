"""Locks, leases and notifications, all between processes of one machine."""

from __future__ import annotations

import errno
import fcntl
import os
import signal

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, forked, opened, put

BUSY = fcntl.LOCK_NB


def _in_child(call) -> object:
    return forked(call)


@case
def locks_of_whole_files() -> Observation:
    put("a")
    found: Observation = {}
    with opened("a", os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)

        def attempt(kind: int) -> str:
            with opened("a", os.O_RDWR) as other:
                return err(fcntl.flock, other, kind | BUSY)

        found["exclusive against exclusive"] = forked(lambda: attempt(fcntl.LOCK_EX))
        found["shared against exclusive"] = forked(lambda: attempt(fcntl.LOCK_SH))
        found["a second descriptor of one process"] = attempt(fcntl.LOCK_EX)
        found["the inherited descriptor"] = forked(
            lambda: err(fcntl.flock, fd, fcntl.LOCK_EX | BUSY)
        )
        fcntl.flock(fd, fcntl.LOCK_SH)
        found["shared against shared"] = forked(lambda: attempt(fcntl.LOCK_SH))
        found["exclusive against shared"] = forked(lambda: attempt(fcntl.LOCK_EX))
        os.rename("a", "b")
        with opened("b", os.O_RDWR) as other:
            found["after a rename"] = err(fcntl.flock, other, fcntl.LOCK_EX | BUSY)
        fcntl.flock(fd, fcntl.LOCK_UN)
        with opened("b", os.O_RDWR) as other:
            found["unlocked"] = err(fcntl.flock, other, fcntl.LOCK_EX | BUSY)
    with opened("b", os.O_RDONLY) as fd:
        found["exclusive of a reader"] = err(fcntl.flock, fd, fcntl.LOCK_EX | BUSY)
    return found


@case
def a_lock_ends_with_the_last_descriptor() -> Observation:
    put("a")
    fd = os.open("a", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    copy = os.dup(fd)
    os.close(fd)
    with opened("a", os.O_RDWR) as other:
        held = err(fcntl.flock, other, fcntl.LOCK_EX | BUSY)
        os.close(copy)
        free = err(fcntl.flock, other, fcntl.LOCK_EX | BUSY)
    return {"held": held, "free": free}


@case
def locks_of_ranges() -> Observation:
    put("a", b"x" * 100)
    found: Observation = {}
    with opened("a", os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 0)
        fcntl.lockf(fd, fcntl.LOCK_SH, 10, 50)

        def attempt(kind: int, length: int, start: int) -> str:
            with opened("a", os.O_RDWR) as other:
                return err(fcntl.lockf, other, kind | BUSY, length, start)

        found["the same range"] = forked(lambda: attempt(fcntl.LOCK_EX, 10, 0))
        found["a part"] = forked(lambda: attempt(fcntl.LOCK_SH, 1, 9))
        found["beside it"] = forked(lambda: attempt(fcntl.LOCK_EX, 10, 10))
        found["shared"] = forked(lambda: attempt(fcntl.LOCK_SH, 10, 50))
        found["to the end"] = forked(lambda: attempt(fcntl.LOCK_EX, 0, 60))

        def ask() -> int:
            raw = kernel.flock_bytes(fcntl.F_WRLCK, 0, 1)
            with opened("a", os.O_RDWR) as other:
                return kernel.flock_kind(fcntl.fcntl(other, fcntl.F_GETLK, raw))

        found["asked"] = forked(ask)
        found["a process does not lock out itself"] = attempt(fcntl.LOCK_EX, 10, 0)
        # Any close of the file by the process ends its locks.
        found["gone after a close of another descriptor"] = forked(
            lambda: attempt(fcntl.LOCK_EX, 10, 0)
        )
        with opened("a", os.O_RDONLY) as reader:
            found["exclusive of a reader"] = err(fcntl.lockf, reader, fcntl.LOCK_EX | BUSY)
    return found


@case
def locks_of_open_descriptions() -> Observation:
    put("a", b"x" * 100)
    found: Observation = {}
    lock = kernel.flock_bytes(fcntl.F_WRLCK, 0, 10)
    with opened("a", os.O_RDWR) as fd, opened("a", os.O_RDWR) as other:
        found["first"] = err(fcntl.fcntl, fd, kernel.F_OFD_SETLK, lock)
        found["second description"] = err(fcntl.fcntl, other, kernel.F_OFD_SETLK, lock)
        found["beside it"] = err(
            fcntl.fcntl, other, kernel.F_OFD_SETLK, kernel.flock_bytes(fcntl.F_WRLCK, 10, 5)
        )
        os.close(os.open("a", os.O_RDWR))
        found["after a close elsewhere"] = err(fcntl.fcntl, other, kernel.F_OFD_SETLK, lock)
        found["inherited by a child"] = forked(
            lambda: err(fcntl.fcntl, fd, kernel.F_OFD_SETLK, lock)
        )
        found["against fcntl locks"] = forked(lambda: err(fcntl.lockf, other, fcntl.LOCK_EX | BUSY))
    return found


@case
def a_lock_is_waited_for() -> Observation:
    put("a")
    reader, writer = os.pipe()
    fd = os.open("a", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    pid = os.fork()
    if pid == 0:
        other = os.open("a", os.O_RDWR)
        os.close(fd)
        os.write(writer, b"waits ")
        fcntl.flock(other, fcntl.LOCK_EX)
        os.write(writer, b"has it")
        os._exit(0)
    seen = os.read(reader, 6)
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.waitpid(pid, 0)
    seen += os.read(reader, 6)
    for number in (reader, writer, fd):
        os.close(number)
    return {"order": seen.decode()}


@case
def a_wait_for_a_lock_is_interrupted() -> Observation:
    put("a")
    fd = os.open("a", os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX)

    def wait() -> str:
        def ring(_number: int, _frame: object) -> None:
            raise InterruptedError(errno.EINTR, "rung")

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with opened("a", os.O_RDWR) as other:
            return err(fcntl.lockf, other, fcntl.LOCK_EX)

    found = {"result": forked(wait)}
    os.close(fd)
    return found


@case
def leases() -> Observation:
    put("a", b"1")
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    with opened("a", os.O_RDONLY) as fd:
        found: Observation = {
            "read lease": err(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_RDLCK),
            "given up": err(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_UNLCK),
            "asked": fcntl.fcntl(fd, fcntl.F_GETLEASE),
        }
    with opened("a", os.O_RDWR) as fd:
        found["read lease of a writer"] = err(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        found["write lease"] = err(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return found


@case
def notifications() -> Observation:
    os.mkdir("d")
    watch = kernel.Inotify("d", kernel.IN_ALL)
    found: Observation = {}
    put("d/f", b"1")
    found["create"] = watch.names()
    os.rename("d/f", "d/g")
    found["rename"] = watch.names()
    os.chmod("d/g", 0o600)
    found["chmod"] = watch.names()
    os.truncate("d/g", 0)
    found["truncate"] = watch.names()
    os.mkdir("d/e")
    os.rmdir("d/e")
    found["mkdir, rmdir"] = watch.names()
    os.symlink("x", "d/s")
    os.unlink("d/g")
    found["symlink, unlink"] = watch.names()
    watch.close()
    put("h")
    watch = kernel.Inotify("h", kernel.IN_ALL)
    os.unlink("h")
    found["of the file itself"] = [name for name in watch.names() if name != "ATTRIB"]
    watch.close()
    return found
