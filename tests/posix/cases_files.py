"""Files as a whole: copies by the kernel, removed, renamed, replaced and executed while open."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile

from tests.posix import kernel
from tests.posix.suite import Observation, case, err, forked, get, opened, put


@case
def copies_inside() -> Observation:
    put("a", b"0123456789" * 1000)
    found: Observation = {}
    with opened("a", os.O_RDWR) as source, opened("b") as target:
        found["copied"] = os.copy_file_range(source, target, 5000, 100, 7)
        found["size"] = os.fstat(target).st_size
        found["bytes"] = os.pread(target, 20, 0).decode("latin-1")
        found["beyond the end"] = os.copy_file_range(source, target, 10, 20000, 0)
        found["up to the end"] = os.copy_file_range(source, target, 5000, 9000, 0)
        found["overlapping"] = err(os.copy_file_range, source, source, 100, 0, 50)
        found["apart in one file"] = os.copy_file_range(source, source, 100, 0, 5000)
        found["clone"] = err(fcntl.ioctl, target, kernel.FICLONE, source)
        os.lseek(target, 0, os.SEEK_SET)
        found["sendfile"] = os.sendfile(target, source, 0, 9)
        found["offset"] = os.lseek(target, 0, os.SEEK_CUR)
    with opened("a", os.O_RDONLY) as source, opened("b", os.O_RDONLY) as target:
        found["to a reader"] = err(os.copy_file_range, source, target, 10)
    with opened("a", os.O_RDONLY) as source, opened("b", os.O_WRONLY | os.O_APPEND) as target:
        found["to an appender"] = err(os.copy_file_range, source, target, 10)
        found["sendfile to an appender"] = err(os.sendfile, target, source, 0, 10)
    with opened(".", os.O_RDONLY) as source, opened("b", os.O_RDWR) as target:
        found["from a directory"] = err(os.copy_file_range, source, target, 10)
    return found


@case
def copies_from_outside() -> Observation:
    found: Observation = {}
    with tempfile.TemporaryFile(dir="/dev/shm") as stream, opened("b") as target:
        stream.write(b"0123456789" * 1000)
        stream.flush()
        found["sendfile"] = os.sendfile(target, stream.fileno(), 0, 6000)
        found["copy_file_range"] = err(os.copy_file_range, stream.fileno(), target, 100, 0, 0)
        reader, writer = os.pipe()
        os.write(writer, b"through a pipe")
        found["splice in"] = os.splice(reader, target, 14, offset_dst=10)
        found["bytes"] = os.pread(target, 30, 0).decode()
        found["splice out"] = os.splice(target, writer, 5, offset_src=10)
        found["piped"] = os.read(reader, 5).decode()
        os.close(reader)
        os.close(writer)
        stream.seek(0)
        found["sendfile out"] = os.sendfile(stream.fileno(), target, 0, 10)
    return found


@case
def bytes_of_a_removed_file() -> Observation:
    found: Observation = {}
    with opened("a") as fd:
        os.write(fd, b"12345")
        os.unlink("a")
        found["nlink"] = os.fstat(fd).st_nlink
        found["write"] = err(os.write, fd, b"678")
        found["read"] = os.pread(fd, 10, 0).decode()
        found["ftruncate"] = err(os.ftruncate, fd, 3)
        found["fchmod"] = err(os.fchmod, fd, 0o600)
        found["fchown"] = err(os.fchown, fd, 1, 1)
        found["futimens"] = err(os.utime, fd, (1, 1))
        found["fsync"] = err(os.fsync, fd)
        found["size, mode"] = [os.fstat(fd).st_size, oct(os.fstat(fd).st_mode)]
        found["mtime"] = os.fstat(fd).st_mtime
        found["by name"] = err(os.stat, "a")
        found["again by /proc"] = err(lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR)))
        found["a new name by link"] = err(
            kernel.linkat, f"/proc/self/fd/{fd}", "b", kernel.AT_SYMLINK_FOLLOW
        )
        put("a", b"other")
        found["the new one"] = get("a")
        found["the old one"] = os.pread(fd, 10, 0).decode()
    return found


@case
def bytes_of_a_renamed_file() -> Observation:
    os.mkdir("d")
    with opened("a") as fd:
        os.write(fd, b"1")
        os.rename("a", "d/b")
        os.write(fd, b"2")
        os.rename("d", "e")
        os.write(fd, b"3")
        link = os.readlink(f"/proc/self/fd/{fd}")
        return {
            "content": get("e/b"),
            "nlink": os.fstat(fd).st_nlink,
            "path": link.endswith("/e/b"),
        }


@case
def bytes_of_a_replaced_file() -> Observation:
    put("a", b"old")
    put("b", b"new")
    with opened("a", os.O_RDWR) as fd:
        os.rename("b", "a")
        os.pwrite(fd, b"x", 3)
        return {
            "old": os.pread(fd, 10, 0).decode(),
            "nlink": os.fstat(fd).st_nlink,
            "new": get("a"),
            "there": os.listdir("."),
        }


@case
def a_child_shares_the_offset() -> Observation:
    with opened("a") as fd:
        os.write(fd, b"parent ")
        forked(lambda: os.write(fd, b"child "))
        os.write(fd, b"parent")
    return {"content": get("a")}


@case
def execution() -> Observation:
    put("script", b"#!/bin/sh\nexit 3\n", 0o755)
    put("plain", b"#!/bin/sh\nexit 3\n", 0o644)

    def start(path: str) -> str | int:
        pid = os.fork()
        if pid == 0:
            try:
                os.execv(path, [path])
            except OSError as exc:
                os._exit(exc.errno or 99)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code if code == 3 else errno.errorcode.get(code, code)

    with open("/bin/true", "rb") as stream:
        put("true", stream.read(), 0o755)
    with opened("true", os.O_RDWR):
        busy = start("./true")
    return {
        "script": start("./script"),
        "not executable": start("./plain"),
        "binary": start("./true"),
        "binary that is written": busy,
    }
