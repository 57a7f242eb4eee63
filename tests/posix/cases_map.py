"""mmap(2) and asynchronous I/O: Linux AIO, io_uring."""

from __future__ import annotations

import mmap
import os
import signal

from tests.posix.queues import (
    AIO_FDSYNC,
    AIO_FSYNC,
    AIO_PREAD,
    AIO_PWRITE,
    FSYNC,
    READ,
    WRITE,
    Aio,
    Ring,
    address,
    aligned,
)
from tests.posix.suite import Observation, case, err, forked, get, later, opened, put

PAGE = 4096


@case
def shared_mappings() -> Observation:
    put("a", b"a" * (2 * PAGE))
    with opened("a", os.O_RDWR) as fd:
        view = mmap.mmap(fd, 2 * PAGE)
        view[0:3] = b"map"
        found: Observation = {"read sees a store": os.pread(fd, 3, 0).decode()}
        os.pwrite(fd, b"pwrite", PAGE)
        found["a mapping sees a write"] = view[PAGE : PAGE + 6].decode()
        found["msync"] = err(view.flush)
        other = mmap.mmap(fd, PAGE, prot=mmap.PROT_READ)
        view[5] = ord("!")
        found["a second mapping"] = other[0:6].decode()
        os.ftruncate(fd, 3 * PAGE)
        view.resize(3 * PAGE)
        view[2 * PAGE] = ord("z")
        found["grown"] = os.pread(fd, 1, 2 * PAGE).decode()
        other.close()
        view.close()
    found["by name"] = get("a")[:6]
    return found


@case
def stores_after_close() -> Observation:
    put("a", b"a" * PAGE)
    with opened("a", os.O_RDWR) as fd:
        view = mmap.mmap(fd, PAGE)
    view[0:5] = b"later"
    os.rename("a", "b")
    view[5:6] = b"!"
    seen = get("b")[:6]
    os.unlink("b")
    view[6] = ord("?")
    last = view[:7].decode()
    view.close()
    return {"seen": seen, "after unlink": last}


@case
def private_mappings() -> Observation:
    put("a", b"a" * PAGE)
    with opened("a", os.O_RDONLY) as fd:
        view = mmap.mmap(fd, PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view[0:3] = b"own"
        found = {"own": view[0:3].decode(), "file": get("a")[:3]}
        found["shared and writable"] = err(
            mmap.mmap, fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
        view.close()
    with opened("a", os.O_WRONLY) as fd:
        found["of a write-only descriptor"] = err(mmap.mmap, fd, PAGE, mmap.MAP_SHARED)
    return found


@case
def mappings_beyond_the_end() -> Observation:
    put("a", b"a" * 100)

    def touch(at: int, size: int) -> int:
        with opened("a", os.O_RDWR) as fd:
            os.ftruncate(fd, 4 * PAGE)
            view = mmap.mmap(fd, 4 * PAGE)
            os.ftruncate(fd, size)
            return view[at]

    def killed(at: int, size: int) -> str | int:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            os._exit(touch(at, size))
        status = os.waitpid(pid, 0)[1]
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "ok"

    return {
        "in the last page": killed(200, 100),
        "in the next page": killed(PAGE + 1, 100),
        "of an emptied file": killed(0, 0),
    }


@case
def the_tail_of_the_last_page_is_zero() -> Observation:
    put("a", b"a" * 100)
    with opened("a", os.O_RDWR) as fd:
        view = mmap.mmap(fd, 100)
        view.close()
        view = mmap.mmap(fd, 0)
        found = {"length": len(view)}
        view.close()
        os.ftruncate(fd, 200)
        found["zeros"] = os.pread(fd, 100, 100).count(b"\0")
    return found


@case
def a_mapping_is_shared_with_a_child() -> Observation:
    put("a", b"a" * PAGE)
    with opened("a", os.O_RDWR) as fd:
        view = mmap.mmap(fd, PAGE)

        def store() -> int:
            view[0:5] = b"child"
            return 0

        forked(store)
        found = {"parent sees": view[0:5].decode(), "file": get("a")[:5]}
        view.close()
    return found


@case
def a_store_moves_the_times() -> Observation:
    put("a", b"a" * PAGE)
    os.utime("a", (1, 1))
    later()
    with opened("a", os.O_RDWR) as fd:
        view = mmap.mmap(fd, PAGE)
        view[0] = 1
        view.flush()
        view.close()
    return {"mtime": os.stat("a").st_mtime > 1}


@case
def asynchronous_io() -> Observation:
    buffer = aligned(4 * PAGE)
    buffer[:PAGE] = b"1" * PAGE
    buffer[PAGE : 2 * PAGE] = b"2" * PAGE
    at = address(buffer)
    aio = Aio()
    found: Observation = {}
    for label, flags in {"cached": 0, "direct": os.O_DIRECT}.items():
        with opened(f"a-{label}", os.O_RDWR | os.O_CREAT | flags) as fd:
            found[f"{label} writes"] = aio.run([
                (AIO_PWRITE, fd, at, PAGE, PAGE),
                (AIO_PWRITE, fd, at + PAGE, PAGE, 0),
            ])  # fmt: skip
            found[f"{label} fsync"] = aio.run([(AIO_FSYNC, fd, 0, 0, 0)])
            found[f"{label} fdsync"] = aio.run([(AIO_FDSYNC, fd, 0, 0, 0)])
            found[f"{label} reads"] = aio.run([
                (AIO_PREAD, fd, at + 2 * PAGE, PAGE, 0),
                (AIO_PREAD, fd, at + 3 * PAGE, PAGE, 2 * PAGE),
            ])  # fmt: skip
            found[f"{label} bytes"] = bytes(buffer[2 * PAGE : 2 * PAGE + 2]).decode()
    aio.close()
    return found


@case
def rings() -> Observation:
    buffer = aligned(2 * PAGE)
    buffer[:5] = b"12345"
    at = address(buffer)
    ring = Ring()
    found: Observation = {}
    with opened("a") as fd:
        found["write"] = ring.run(WRITE, fd, at, 5, 0)
        found["write far"] = ring.run(WRITE, fd, at, 5, 10000)
        found["fsync"] = ring.run(FSYNC, fd, 0, 0, 0)
        found["read"] = ring.run(READ, fd, at + PAGE, 100, 10000)
        found["bytes"] = bytes(buffer[PAGE : PAGE + 5]).decode()
        found["read at the end"] = ring.run(READ, fd, at, 5, 20000)
    with opened("a", os.O_RDONLY) as fd:
        found["write to a reader"] = ring.run(WRITE, fd, at, 5, 0)
    with opened("b", os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd:
        found["direct write"] = ring.run(WRITE, fd, at, PAGE, 0)
        found["direct read"] = ring.run(READ, fd, at, PAGE, 0)
    ring.close()
    return found


@case
def rings_change_names() -> Observation:
    from tests.posix import queues

    ring = Ring()
    here = -100
    names = {
        name: bytearray(name.encode() + b"\0") for name in ("d", "f", "g", "l", "target", "missing")
    }
    at = {name: address(raw) for name, raw in names.items()}
    found: Observation = {
        "mkdir": ring.run(queues.MKDIRAT, here, at["d"], 0o755, 0),
        "mkdir again": ring.run(queues.MKDIRAT, here, at["d"], 0o755, 0),
        "symlink": ring.run(queues.SYMLINKAT, here, at["target"], 0, at["l"]),
    }
    put("f")
    found["rename"] = ring.run(queues.RENAMEAT, here, at["f"], 0xFFFFFF9C, at["g"])
    found["unlink"] = ring.run(queues.UNLINKAT, here, at["g"], 0, 0)
    found["unlink missing"] = ring.run(queues.UNLINKAT, here, at["missing"], 0, 0)
    found["rmdir"] = ring.run(queues.UNLINKAT, here, at["d"], 0, 0, flags=0x200)
    found["left"] = os.listdir(".")
    ring.close()
    return found
