"""A small file system that survives its process, to drive the FUSE driver with; and its server.

Names, nodes and kept replies lie in a SQLite database, bytes in files beside it. Some names
misbehave on purpose: `bug-*` raises, `no-errno-*` raises an OSError without one, `slow-*` needs the
pool, `partial-*` is not complete, `stall-before-*` and `stall-after-*` hang a mutation as long as
the file `stall` exists. A published node gets a successor (and ESTALE once) when it is changed.
Run as a module it serves a device descriptor that it inherits and answers commands on stdin.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ckptgate.errors import WouldBlockError
from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Attr, Caller, DirEntry, Entry, FsStats, Opened, SetAttr
from ckptgate_adapters.fuse.server import FuseServer
from ckptgate_adapters.fuse.session import FuseSession

SCHEMA = """
create table if not exists node(ino integer primary key autoincrement, kind text, mode int,
  uid int, gid int, mtime int, target text default '', file text default '',
  published int default 0);
create table if not exists name(parent int, name text, ino int, primary key(parent, name));
create index if not exists name_ino on name(ino);
create table if not exists reply(request integer primary key, body blob);
create table if not exists handle(fh integer primary key autoincrement, ino int, flags int);
create table if not exists xattr(ino int, name text, value blob, primary key(ino, name));
create table if not exists done(what text);
insert or ignore into node(ino, kind, mode, uid, gid, mtime) values(1, 'dir', 493, 0, 0, 0);
"""


class ToyFs:
    def __init__(self, root: str, *, timeout_s: float = 1.0) -> None:
        self.root = root
        self.timeout_s = timeout_s
        self.lock = threading.RLock()
        self.depth = 0
        self.db = sqlite3.connect(f"{root}/toy.db", isolation_level=None, check_same_thread=False)
        self.db.execute("pragma journal_mode=wal")
        self.db.execute("pragma synchronous=off")
        self.db.executescript(SCHEMA)
        self.fds: dict[int, int] = {}
        self.looked: dict[int, int] = {}
        self.dirs: dict[int, list[tuple[str, int]]] = {}
        self.settled: list[int] = []
        self.next_dir = 1 << 40 | (os.getpid() << 16)
        self.is_complete = True
        self.ensured = 0

    # -- transactions

    @contextlib.contextmanager
    def atomic(self, caller: Caller) -> Iterator[None]:
        with self.lock:
            self.db.execute("begin immediate")
            try:
                yield
            except OSError as exc:
                # What ESTALE announces must stay.
                self.db.execute("commit" if exc.errno == errno.ESTALE else "rollback")
                raise
            except BaseException:
                self.db.execute("rollback")
                raise
            self.db.execute("commit")

    def replay(self, caller: Caller) -> bytes | None:
        row = self.one("select body from reply where request=?", caller.request)
        return None if row is None else bytes(row[0])

    def remember(self, caller: Caller, reply: bytes) -> None:
        assert caller.request is not None
        self.db.execute("insert or replace into reply values(?,?)", (caller.request, reply))

    def must_settle(self, ino: int, *, is_close: bool = False) -> bool:
        return self.stalls("after", self.name_of(ino))

    def settle(self, caller: Caller, ino: int, *, is_close: bool = False) -> None:
        assert caller.may_block
        self.settled.append(ino)
        name = self.name_of(ino)
        while self.stalls("after", name):
            time.sleep(0.02)

    # -- helpers

    def one(self, sql: str, *args: object) -> Any:
        with self.lock:
            return self.db.execute(sql, args).fetchone()

    def name_of(self, ino: int) -> str:
        row = self.one("select name from name where ino=?", ino)
        return "" if row is None else row[0]

    def stalls(self, when: str, name: str) -> bool:
        return name.startswith(f"stall-{when}-") and os.path.exists(f"{self.root}/stall")

    def check(self, caller: Caller, name: str) -> None:
        if name.startswith("bug-"):
            raise ZeroDivisionError(name)
        if name.startswith("no-errno-"):
            raise OSError(name)
        if name.startswith("slow-") and not caller.may_block:
            raise WouldBlockError(name)
        while self.stalls("before", name):
            time.sleep(0.02)

    def node(self, ino: int) -> Any:
        row = self.one("select * from node where ino=?", ino)
        if row is None:
            raise OSError(errno.ENOENT, "no such node")
        return row

    def path(self, ino: int) -> str:
        return f"{self.root}/files/{self.node(ino)[7]}"

    def child(self, parent: int, name: str) -> int:
        row = self.one("select ino from name where parent=? and name=?", parent, name)
        if row is None:
            raise OSError(errno.ENOENT, name)
        return int(row[0])

    def attr(self, ino: int) -> Attr:
        _, kind, mode, uid, gid, mtime, target, _, _ = self.node(ino)
        size, blocks, links = len(target), 0, 2 if kind == "dir" else 1
        if kind == "file":
            st = os.stat(self.path(ino))
            size, blocks = st.st_size, st.st_blocks
            mtime = mtime or st.st_mtime_ns
            links = 1 if self.name_of(ino) else 0
        return Attr(
            ino, NodeKind(kind), mode, links, uid, gid, size, blocks, mtime, mtime, mtime,
            self.timeout_s,
        )  # fmt: skip

    def entry(self, ino: int) -> Entry:
        self.looked[ino] = self.looked.get(ino, 0) + 1
        return Entry(self.attr(ino), self.timeout_s)

    def new_version(self, ino: int) -> None:
        """Published nodes never change: make a copy under the same name, and say ESTALE."""
        _, kind, mode, uid, gid, _, _, file, published = self.node(ino)
        if not published:
            return
        row = self.one("select parent, name from name where ino=?", ino)
        if row is None:
            return
        new = self.insert(NodeKind(kind), mode, uid, gid)
        if kind == "file":
            shutil.copy(f"{self.root}/files/{file}", self.path(new))
        self.db.execute("update name set parent=? where parent=?", (new, ino))
        self.db.execute("update name set ino=? where parent=? and name=?", (new, *row))
        self.db.execute("insert into done values('new-version')")
        raise OSError(errno.ESTALE, "a new version was made")

    def insert(self, kind: NodeKind, mode: int, uid: int, gid: int, target: str = "") -> int:
        mtime = time.time_ns() if kind is not NodeKind.FILE else 0
        cursor = self.db.execute(
            "insert into node(kind, mode, uid, gid, mtime, target) values(?,?,?,?,?,?)",
            (kind.value, mode, uid, gid, mtime, target),
        )
        ino = cursor.lastrowid
        assert ino is not None
        if kind is NodeKind.FILE:
            self.db.execute("update node set file=? where ino=?", (str(ino), ino))
            os.close(os.open(f"{self.root}/files/{ino}", os.O_CREAT | os.O_RDWR, 0o600))
        return ino

    def link_name(self, parent: int, name: str, ino: int) -> None:
        try:
            self.db.execute("insert into name values(?,?,?)", (parent, name, ino))
        except sqlite3.IntegrityError:
            raise OSError(errno.EEXIST, name) from None

    # -- names

    def lookup(self, caller: Caller, parent: int, name: str) -> Entry:
        self.check(caller, name)
        with self.lock:
            return self.entry(self.child(parent, name))

    def looked_up(self, nodes: Sequence[int]) -> None:
        with self.lock:
            for ino in nodes:
                self.looked[ino] = self.looked.get(ino, 0) + 1

    def forget(self, nodes: Sequence[tuple[int, int]]) -> None:
        with self.lock:
            for ino, count in nodes:
                self.looked[ino] = self.looked.get(ino, 0) - count

    def make(self, caller: Caller, parent: int, name: str, kind: NodeKind, mode: int,
             target: str = "") -> int:  # fmt: skip
        self.check(caller, name)
        self.new_version(parent)
        if self.one("select 1 from name where parent=? and name=?", parent, name):
            raise OSError(errno.EEXIST, name)
        ino = self.insert(kind, mode, caller.uid, caller.gid, target)
        self.link_name(parent, name, ino)
        self.db.execute("insert into done values(?)", (f"make {name}",))
        return ino

    def mkdir(self, caller: Caller, parent: int, name: str, mode: int) -> Entry:
        return self.entry(self.make(caller, parent, name, NodeKind.DIR, mode))

    def symlink(self, caller: Caller, parent: int, name: str, target: str) -> Entry:
        return self.entry(self.make(caller, parent, name, NodeKind.SYMLINK, 0o777, target))

    def readlink(self, caller: Caller, ino: int) -> str:
        return str(self.node(ino)[6])

    def unlink(self, caller: Caller, parent: int, name: str) -> None:
        self.check(caller, name)
        self.new_version(parent)
        self.child(parent, name)
        self.db.execute("delete from name where parent=? and name=?", (parent, name))

    def rmdir(self, caller: Caller, parent: int, name: str) -> None:
        self.new_version(parent)
        ino = self.child(parent, name)
        if self.one("select 1 from name where parent=?", ino):
            raise OSError(errno.ENOTEMPTY, name)
        self.db.execute("delete from name where parent=? and name=?", (parent, name))

    def rename(
        self, caller: Caller, parent: int, name: str, new_parent: int, new_name: str, flags: int
    ) -> None:
        self.new_version(parent)
        self.new_version(new_parent)
        ino = self.child(parent, name)
        other = self.one("select ino from name where parent=? and name=?", new_parent, new_name)
        if flags & 1 and other:
            raise OSError(errno.EEXIST, new_name)
        if flags & 2:
            other_ino = self.child(new_parent, new_name)
            self.db.execute(
                "update name set ino=? where parent=? and name=?", (other_ino, parent, name)
            )
        else:
            self.db.execute("delete from name where parent=? and name=?", (parent, name))
        self.db.execute("delete from name where parent=? and name=?", (new_parent, new_name))
        self.link_name(new_parent, new_name, ino)

    # -- attributes

    def getattr(self, caller: Caller, ino: int, fh: int | None) -> Attr:
        self.check(caller, self.name_of(ino))
        with self.lock:
            return self.attr(ino)

    def setattr(self, caller: Caller, ino: int, changes: SetAttr, fh: int | None) -> Attr:
        with self.lock:
            if fh is None:
                self.new_version(ino)
            for column, value in [("mode", changes.mode), ("uid", changes.uid),
                                  ("gid", changes.gid), ("mtime", changes.mtime_ns)]:  # fmt: skip
                if value is not None:
                    self.db.execute(f"update node set {column}=? where ino=?", (value, ino))
            if changes.size is not None:
                os.truncate(self.path(ino), changes.size)
            return self.attr(ino)

    def statfs(self, caller: Caller) -> FsStats:
        v = os.statvfs(self.root)
        return FsStats(
            v.f_blocks, v.f_bfree, v.f_bavail, v.f_files, v.f_ffree, v.f_bsize, v.f_frsize
        )

    def getxattr(self, caller: Caller, ino: int, name: str) -> bytes:
        row = self.one("select value from xattr where ino=? and name=?", ino, name)
        if row is None:
            raise OSError(errno.ENODATA, name)
        return bytes(row[0])

    def setxattr(self, caller: Caller, ino: int, name: str, value: bytes, flags: int) -> None:
        self.db.execute("insert or replace into xattr values(?,?,?)", (ino, name, value))

    def listxattr(self, caller: Caller, ino: int) -> Sequence[str]:
        with self.lock:
            return [row[0] for row in self.db.execute("select name from xattr where ino=?", (ino,))]

    def removexattr(self, caller: Caller, ino: int, name: str) -> None:
        self.getxattr(caller, ino, name)
        self.db.execute("delete from xattr where ino=? and name=?", (ino, name))

    # -- files

    def opened(self, fh: int, ino: int, flags: int) -> Opened:
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC
        fd = os.open(self.path(ino), os.O_RDWR if writes else os.O_RDONLY)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        self.fds[fh] = fd
        return Opened(fh, fd, self.complete(ino))

    def complete(self, ino: int) -> bool:
        return self.is_complete and not self.name_of(ino).startswith("partial-")

    def handle(self, ino: int, flags: int) -> int:
        cursor = self.db.execute("insert into handle(ino, flags) values(?,?)", (ino, flags))
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def create(
        self, caller: Caller, parent: int, name: str, flags: int, mode: int
    ) -> tuple[Entry, Opened]:
        ino = self.make(caller, parent, name, NodeKind.FILE, mode)
        return self.entry(ino), self.opened(self.handle(ino, flags & os.O_ACCMODE), ino, flags)

    def open(self, caller: Caller, ino: int, flags: int) -> Opened:
        self.check(caller, self.name_of(ino))
        with self.lock:
            if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
                self.new_version(ino)
            return self.opened(self.handle(ino, flags & os.O_ACCMODE), ino, flags)

    def reopen(self, fh: int) -> Opened | None:
        with self.lock:
            if fh in self.fds:
                ino = (self.one("select ino from handle where fh=?", fh) or (0,))[0]
                return Opened(fh, self.fds[fh], self.complete(ino))
            row = self.one("select ino, flags from handle where fh=?", fh)
            return None if row is None else self.opened(fh, row[0], row[1])

    def ensure(self, caller: Caller, fh: int, offset: int, length: int) -> None:
        if not caller.may_block:
            raise WouldBlockError("ensure")
        self.ensured += 1

    def read(self, caller: Caller, fh: int, offset: int, length: int) -> bytes:
        raise OSError(errno.EBADF, "never without a file")

    def flush(self, caller: Caller, fh: int) -> bool:
        with self.lock:
            self.db.execute("insert into done values(?)", (f"flush {fh}",))
        return True

    def release(self, fh: int) -> None:
        with self.lock:
            self.db.execute("delete from handle where fh=?", (fh,))
            fd = self.fds.pop(fh, None)
        if fd is not None:
            os.close(fd)

    def fsync(self, caller: Caller, fh: int, *, data_only: bool) -> None:
        assert caller.may_block
        with self.lock:
            self.reopen(fh)
        os.fsync(self.fds[fh])

    def write_failed(self, caller: Caller, fh: int, number: int) -> None:
        return

    def fsyncdir(self, caller: Caller, ino: int) -> None:
        return

    def opendir(self, caller: Caller, ino: int) -> int:
        with self.lock:
            self.next_dir += 1
            row = self.one("select parent from name where ino=?", ino)
            names = [(".", ino), ("..", row[0] if row else 1)]
            names += self.db.execute(
                "select name, ino from name where parent=? order by ino", (ino,)
            ).fetchall()
            self.dirs[self.next_dir] = names
            return self.next_dir

    def readdir(
        self, caller: Caller, fh: int, cookie: int, *, with_entries: bool = True
    ) -> Sequence[DirEntry]:
        with self.lock:
            out = []
            for number, (name, ino) in enumerate(self.dirs[fh][cookie : cookie + 400], cookie + 1):
                attr = self.attr(ino)
                out.append(DirEntry(name, ino, attr.kind, number, Entry(attr, self.timeout_s)))
            return out

    def releasedir(self, fh: int) -> None:
        self.dirs.pop(fh, None)


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    root = options["root"]
    os.makedirs(f"{root}/files", exist_ok=True)
    fs = ToyFs(root, timeout_s=options.get("timeout_s", 1.0))
    fs.is_complete = options.get("is_complete", True)
    fd, state = options["fd"], f"{root}/session"
    if options.get("resume"):
        session = FuseSession.resume(fd, state)
        if options.get("forget_opens"):
            os.unlink(f"{state}.opens")
    else:
        session = FuseSession(fd, state_path=state)
    server = FuseServer(fs, session, passthrough=options.get("passthrough", True), pool_threads=4)

    def command(line: str) -> object:
        word, *args = line.split()
        if word == "counts":
            return server.counts()
        if word == "passthrough":
            return server.passthrough_state
        if word == "looked":
            return sum(fs.looked.values())
        if word == "ensured":
            return fs.ensured
        if word == "cpu":
            return time.process_time()
        if word == "inval-name":
            server.invalidate_name(int(args[0]), args[1])
            return "queued"
        if word == "inval-node":
            server.invalidate_node(int(args[0]))
            return "queued"
        if word == "publish":
            # Out of band: nobody told the kernel.
            with fs.lock:
                ino = 1
                for part in args[0].split("/"):
                    ino = fs.child(ino, part)
                fs.db.execute("update node set published=1 where ino=?", (ino,))
            return ino
        if word == "done":
            with fs.lock:
                return [row[0] for row in fs.db.execute("select what from done")]
        raise ValueError(line)

    def commands() -> None:
        for line in sys.stdin:
            if line.strip() == "stop":
                # Said first: the end of `serve` is said by another thread.
                print(json.dumps("stopping"), flush=True)
                server.stop()
                continue
            print(json.dumps(command(line)), flush=True)

    threading.Thread(target=commands, daemon=True).start()
    print(json.dumps("ready"), flush=True)
    server.serve()
    print(json.dumps("served"), flush=True)
    # The commands thread holds stdin: a normal exit would wait for its lock.
    os._exit(0)


if __name__ == "__main__":
    main()
