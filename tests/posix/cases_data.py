"""Reading, writing, seeking, truncating, allocating, copying."""

from __future__ import annotations

import fcntl
import os
import resource
import signal

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, forked, get, opened, put

PAGE = 4096


@case
def append_goes_to_the_end() -> Observation:
    put("a", b"start ")
    with opened("a", os.O_RDWR | os.O_APPEND) as fd, opened("a", os.O_RDWR | os.O_APPEND) as other:
        os.write(fd, b"one ")
        os.write(other, b"two ")
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"three ")
        at = os.lseek(fd, 0, os.SEEK_CUR)
        os.pwrite(fd, b"four", 0)
        os.ftruncate(other, 6)
        os.write(fd, b"five")
    return {"content": get("a"), "offset": at}


@case
def append_from_two_processes() -> Observation:
    put("a")

    def work() -> int:
        with opened("a", os.O_WRONLY | os.O_APPEND) as fd:
            for _ in range(200):
                os.write(fd, b"child.\n")
        return 0

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    with opened("a", os.O_WRONLY | os.O_APPEND) as fd:
        for _ in range(200):
            os.write(fd, b"parent\n")
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    lines = get("a").splitlines()
    return {"lines": len(lines), "parent": lines.count("parent"), "child": lines.count("child.")}


@case
def append_set_later() -> Observation:
    put("a", b"12345")
    with opened("a", os.O_RDWR) as fd:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        os.write(fd, b"6")
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"x")
    return {"content": get("a")}


@case
def writes_of_all_sizes_and_places() -> Observation:
    with opened("a") as fd:
        counts = [
            os.pwrite(fd, b"", 0),
            os.pwrite(fd, b"end", 10 * PAGE),
            os.pwrite(fd, b"x" * 5001, 1000),
            os.pwritev(fd, [b"one", b"", b"two"], 3),
            os.writev(fd, [b"a", b"b"]),
            os.pwrite(fd, b"z" * (3 << 20), 7),
        ]
        size = os.fstat(fd).st_size
        parts = [bytearray(3), bytearray(0), bytearray(5)]
        read = os.preadv(fd, parts, 0)
        beyond = os.pread(fd, 10, size)
        short = len(os.pread(fd, 100, size - 10))
    return {
        "counts": counts,
        "size": size,
        "read": read,
        "start": bytes(b"".join(parts)).decode("latin-1"),
        "beyond the end": beyond.decode(),
        "at the end": short,
    }


@case
def offsets_that_are_not_allowed() -> Observation:
    with opened("a") as fd:
        return {
            "pwrite -1": err(os.pwrite, fd, b"1", -1),
            "pread -1": err(os.pread, fd, 1, -1),
            "lseek -1": err(os.lseek, fd, -1, os.SEEK_SET),
            "lseek end -1": err(os.lseek, fd, -1, os.SEEK_END),
            "lseek bad whence": err(os.lseek, fd, 0, 99),
            "lseek far": err(os.lseek, fd, 1 << 40, os.SEEK_SET),
            "ftruncate -1": err(os.ftruncate, fd, -1),
            "truncate -1": err(os.truncate, "a", -1),
            "size": os.fstat(fd).st_size,
        }


@case
def sizes_that_are_too_large() -> Observation:
    with opened("a") as fd:
        return {
            "pwrite at 2^63-1": err(os.pwrite, fd, b"12", (1 << 63) - 1),
            "pwrite at 2^62": err(os.pwrite, fd, b"12", 1 << 62),
            "ftruncate 2^62": err(os.ftruncate, fd, 1 << 62),
            "truncate 2^62": err(os.truncate, "a", 1 << 62),
            "size": os.fstat(fd).st_size,
        }


@case
def a_limit_of_the_file_size() -> Observation:
    def limited() -> Observation:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
        with opened("a") as fd:
            return {
                "write up to it": os.pwrite(fd, b"x" * 8000, 0),
                "write over it": os.pwrite(fd, b"x" * 8000, 8000),
                "write beyond": err(os.pwrite, fd, b"x", 10000),
                "ftruncate": err(os.ftruncate, fd, 20000),
                "fallocate": err(kernel.fallocate, fd, 0, 0, 20000),
                "size": os.fstat(fd).st_size,
            }

    return forked(limited)


@case
def truncation() -> Observation:
    put("a", b"0123456789")
    found: Observation = {"down by path": err(os.truncate, "a", 4), "content": get("a")}
    with opened("a", os.O_RDWR) as fd:
        found["up by descriptor"] = err(os.ftruncate, fd, 8)
        found["zeros"] = os.pread(fd, 10, 0).decode("latin-1")
        os.pwrite(fd, b"x", 100)
        found["down again"] = err(os.ftruncate, fd, 50)
        os.ftruncate(fd, 200)
        found["no old bytes"] = os.pread(fd, 200, 50).strip(b"\0").decode()
        found["size"] = os.fstat(fd).st_size
    os.mkdir("d")
    os.symlink("a", "l")
    found["directory"] = err(os.truncate, "d", 0)
    found["by link"] = err(os.truncate, "l", 1)
    found["missing"] = err(os.truncate, "m", 1)
    found["at last"] = os.stat("a").st_size
    return found


@case
def truncation_to_the_same_size_changes_nothing_but_times() -> Observation:
    put("a", b"123")
    with opened("a", os.O_RDWR) as fd:
        os.ftruncate(fd, 3)
    return {"content": get("a")}


@case
def holes_are_found() -> Observation:
    with opened("a") as fd:
        os.pwrite(fd, b"x" * PAGE, 0)
        os.pwrite(fd, b"x" * PAGE, 1 << 20)
        os.ftruncate(fd, 4 << 20)
        os.fsync(fd)
        return {
            "hole": os.lseek(fd, 0, os.SEEK_HOLE),
            "data": os.lseek(fd, PAGE, os.SEEK_DATA),
            "hole after data": os.lseek(fd, 1 << 20, os.SEEK_HOLE),
            "data in the tail": err(os.lseek, fd, 2 << 20, os.SEEK_DATA),
            "data beyond": err(os.lseek, fd, 4 << 20, os.SEEK_DATA),
            "hole beyond": err(os.lseek, fd, 5 << 20, os.SEEK_HOLE),
            "hole at -1": err(os.lseek, fd, -1, os.SEEK_HOLE),
            "offset is moved": os.lseek(fd, 0, os.SEEK_CUR),
            "is sparse": os.fstat(fd).st_blocks * 512 < 1 << 20,
        }


@case
def holes_of_an_empty_file() -> Observation:
    with opened("a") as fd:
        return {
            "data": err(os.lseek, fd, 0, os.SEEK_DATA),
            "hole": err(os.lseek, fd, 0, os.SEEK_HOLE),
        }


@case
def allocation_modes() -> Observation:
    found: Observation = {}
    modes = {
        "reserve": 0,
        "keep size": kernel.KEEP_SIZE,
        "punch": kernel.PUNCH_HOLE | kernel.KEEP_SIZE,
        "punch without keep": kernel.PUNCH_HOLE,
        "zero": kernel.ZERO_RANGE,
        "zero, keep size": kernel.ZERO_RANGE | kernel.KEEP_SIZE,
        "collapse": kernel.COLLAPSE_RANGE,
        "insert": kernel.INSERT_RANGE,
        "unknown": 1 << 20,
    }
    for label, mode in modes.items():
        put("a", b"x" * (4 * PAGE))
        with opened("a", os.O_RDWR) as fd:
            found[label] = err(kernel.fallocate, fd, mode, PAGE, 8 * PAGE)
            found[f"{label} inside"] = err(kernel.fallocate, fd, mode, PAGE, PAGE)
            found[f"{label} size"] = os.fstat(fd).st_size
            found[f"{label} left"] = os.pread(fd, 20 * PAGE, 0).count(b"x")
            found[f"{label} length 0"] = err(kernel.fallocate, fd, mode, 0, 0)
            found[f"{label} offset -1"] = err(kernel.fallocate, fd, mode, -1, 1)
            found[f"{label} stat agrees"] = os.stat("a").st_size == os.lseek(fd, 0, os.SEEK_END)
    return found


@case
def allocation_takes_room() -> Observation:
    with opened("a") as fd:
        os.posix_fallocate(fd, 0, 1 << 20)
        taken = os.fstat(fd).st_blocks * 512 >= 1 << 20
        kernel.fallocate(fd, kernel.KEEP_SIZE | kernel.PUNCH_HOLE, 0, 1 << 20)
        punched = os.fstat(fd).st_blocks * 512 < 1 << 18
        return {"taken": taken, "given back": punched, "size": os.fstat(fd).st_size}


@case
def flags_of_single_reads_and_writes() -> Observation:
    put("a", b"0123456789")
    found: Observation = {}
    with opened("a", os.O_RDWR) as fd:
        found["HIPRI read"] = err(os.preadv, fd, [bytearray(4)], 0, os.RWF_HIPRI)
        found["DSYNC"] = err(os.pwritev, fd, [b"x"], 0, os.RWF_DSYNC)
        found["SYNC"] = err(os.pwritev, fd, [b"y"], 1, os.RWF_SYNC)
        found["APPEND"] = err(os.pwritev, fd, [b"z"], 0, os.RWF_APPEND)
        found["unknown"] = err(os.pwritev, fd, [b"q"], 0, 1 << 30)
        found["content"] = os.pread(fd, 20, 0).decode()
    return found


@case
def reads_that_must_not_wait() -> Observation:
    put("a", b"0123456789")
    with opened("a", os.O_RDWR) as fd:
        os.pread(fd, 10, 0)
        return {"cached": err(os.preadv, fd, [bytearray(4)], 0, os.RWF_NOWAIT)}


@case
def direct_input_and_output() -> Observation:
    import mmap

    found: Observation = {}
    buffer = mmap.mmap(-1, 4 * PAGE)
    buffer[:] = b"d" * len(buffer)
    with opened("a", os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd:
        found["aligned write"] = os.pwrite(fd, buffer, 0)
        found["aligned read"] = os.preadv(fd, [buffer], 0)
        found["read at the end"] = os.preadv(fd, [buffer], 4 * PAGE)
        found["unaligned length"] = err(os.pwrite, fd, memoryview(buffer)[:100], 0)
        found["unaligned offset"] = err(os.pwrite, fd, memoryview(buffer)[:512], 7)
        found["unaligned memory"] = err(os.pwrite, fd, memoryview(buffer)[1:513], 0)
        found["fsync"] = err(os.fsync, fd)
        with opened("a", os.O_RDWR) as cached:
            os.pwrite(cached, b"cached", 0)
            os.preadv(fd, [buffer], 0)
            found["sees a cached write"] = bytes(buffer[:6]).decode()
            buffer[:3] = b"new"
            os.pwrite(fd, buffer, 0)
            found["is seen by a cached read"] = os.pread(cached, 3, 0).decode()
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        found["direct taken off"] = err(os.pwrite, fd, b"123", 1)
    return found


@case
def advice_and_single_syncs() -> Observation:
    put("a", b"x" * PAGE * 4)
    with opened("a", os.O_RDWR) as fd:
        os.pwrite(fd, b"y", 0)
        return {
            "fadvise": err(os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED),
            "fadvise sequential": err(os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_SEQUENTIAL),
            "fadvise bad": err(os.posix_fadvise, fd, 0, 0, 99),
            "readahead": err(kernel.call, "readahead", fd, 0, PAGE),
            "sync_file_range": err(kernel.call, "sync_file_range", fd, 0, PAGE, 7),
            "fdatasync": err(os.fdatasync, fd),
            "fsync": err(os.fsync, fd),
            "syncfs": err(kernel.call, "syncfs", fd),
            "content": os.pread(fd, 2, 0).decode(),
        }


@case
def bytes_waiting_in_a_file() -> Observation:
    put("a", b"12345")
    with opened("a", os.O_RDONLY) as fd:
        raw = bytearray(4)
        return {
            "FIONREAD": err(fcntl.ioctl, fd, kernel.FIONREAD, raw),
            "count": raw[0],
            "unknown ioctl": err(fcntl.ioctl, fd, 0x1234),
            "tty": os.isatty(fd),
        }


@case
def flags_of_inodes() -> Observation:
    put("a")
    with opened("a", os.O_RDONLY) as fd:
        return {"GETFLAGS": err(fcntl.ioctl, fd, kernel.FS_IOC_GETFLAGS, bytearray(8))}
