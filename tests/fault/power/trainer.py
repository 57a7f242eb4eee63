"""In the guest: saves checkpoint after checkpoint until the power goes, and says what is promised.

`trainer.py MOUNT ACKNOWLEDGED FIRST_STEP`. Each line of the file ACKNOWLEDGED (on the host, synced)
is a promise that somebody relies on:

    file PATH DIGEST    fsync of that file returned
    plain PATH DIGEST   fsync of it, the rename to that name and fsync of its directory returned
    asked NAME          the commit of everything was asked for
    committed NAME      the mount said that it is committed
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time

FILES = 4
WAIT_S = 4.0


class Promises:
    """Where acknowledged things are noted, beyond the reach of the guest's power."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, *words: str) -> None:
        os.write(self._fd, (" ".join(words) + "\n").encode())
        os.fsync(self._fd)


def put(path: str, data: bytes, *, is_synced: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for start in range(0, len(data), 20_000):
        os.write(fd, data[start : start + 20_000])
    if is_synced:
        os.fsync(fd)
    os.close(fd)


def save(mount: str, step: int, promises: Promises) -> None:
    chance = random.Random(step)
    name = f"step-{step}"
    folder = f"{mount}/run/{name}"
    os.makedirs(folder + "/deep")
    for number in range(FILES):
        path = f"{folder}/deep/{number}.bin" if number % 2 else f"{folder}/{number}.bin"
        data = chance.randbytes(chance.randrange(1, 150_000))
        is_synced = number > 0 or step % 2 == 0
        put(path, data, is_synced=is_synced)
        if is_synced:
            digest = hashlib.blake2b(data).hexdigest()
            promises.add("file", os.path.relpath(path, mount), digest)
    plain(mount, step, promises)
    os.setxattr(folder, "user.ckptgate.commit", b"all")
    promises.add("asked", name)
    deadline = time.monotonic() + WAIT_S
    while step % 3 and time.monotonic() < deadline:
        state = json.loads(os.getxattr(folder, "user.ckptgate.state"))
        if state["state"] == "committed":
            promises.add("committed", name)
            return
        time.sleep(0.05)


def plain(mount: str, step: int, promises: Promises) -> None:
    """The classic way to replace a file: a new one, synced, renamed over the old one."""
    data = b"step %d\n" % step * 50
    put(f"{mount}/config.json.new", data, is_synced=True)
    os.rename(f"{mount}/config.json.new", f"{mount}/config.json")
    if step % 2:
        return
    fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    promises.add("plain", "config.json", hashlib.blake2b(data).hexdigest())


def main() -> None:
    mount, noted, first = sys.argv[1:]
    promises = Promises(noted)
    for step in range(int(first), int(first) + 10_000):
        save(mount, step, promises)


main()
