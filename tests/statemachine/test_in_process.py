"""The name space in one process against a plain directory: thousands of steps, with restarts.

Each mutation is a request with an id, as the kernel's are. After a simulated death of the mount a
successor on the same spool gets the last request again: what was done is answered and not repeated,
what was undone is done now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace
from tests.unit.vfs.conftest import (
    JOB_A,
    FakeCatalog,
    FakeClock,
    FakeIdentify,
    FakeInvalidations,
    FakeWaker,
    World,
)

from ckptgate.model.kinds import DEFAULT_PATTERNS
from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.settings import VfsSettings
from ckptgate.vfs.vfs import Vfs
from ckptgate_adapters.sqlite_spool import SqliteSpool

PATHS = ("a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "f")
TOP = "step-1"


class DiedError(Exception):
    """The mount is killed before its transaction ends."""


class InProcess(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = tempfile.TemporaryDirectory()
        spool_path = f"{self.base.name}/spool"
        self.spool = SqliteSpool.create_or_open(spool_path, store_url="memory://", host="node")
        self.identify, self.clock = FakeIdentify(), FakeClock()
        self.identify.add(100, JOB_A)
        self.catalog = FakeCatalog(self.spool)
        self.waker, self.invalidations = FakeWaker(), FakeInvalidations()
        self.request = 0
        self.world = World(
            self.new_vfs(is_takeover=False), self.spool, self.catalog, self.identify, self.clock,
            self.waker, self.invalidations,
        )  # fmt: skip
        self.local = Path(self.base.name) / "local"
        self.local.mkdir()
        self.world.mkdir(self.world.a, TOP)

    def new_vfs(self, *, is_takeover: bool) -> Vfs:
        """A mount process on the spool."""
        vfs = Vfs(
            spool=self.spool,
            catalog=self.catalog,
            waker=self.waker,
            clock=self.clock,
            patterns=DEFAULT_PATTERNS,
            identify=self.identify,
            settings=VfsSettings(),
            invalidations=self.invalidations,
        )
        vfs.start_session(is_takeover=is_takeover)
        return vfs

    def once(self, death: str, action: Callable[[Caller], None]) -> int:
        """Do *action* as a request, whose mount dies as *death* says; its errno or 0."""
        self.request += 1
        caller = replace(self.world.a, request=self.request)
        reply = str(self.request).encode()
        try:
            with contextlib.suppress(DiedError), self.world.vfs.atomic(caller):
                action(caller)
                self.world.vfs.remember(caller, reply)
                if death == "before":
                    raise DiedError
        except OSError as exc:
            return exc.errno or -1
        if death == "none":
            return 0
        self.world.vfs = self.new_vfs(is_takeover=True)
        kept = self.world.vfs.replay(caller)
        assert kept == (None if death == "before" else reply)
        if kept is None:
            with self.world.vfs.atomic(caller):
                action(caller)
                self.world.vfs.remember(caller, reply)
        return 0

    def both(self, death: str, there: Callable[[Caller], None], here: Callable[[], object]) -> None:
        """The same on both sides; the same errno."""
        expected = 0
        try:
            here()
        except OSError as exc:
            expected = exc.errno or 0
        assert self.once(death, there) == expected

    DEATHS = st.sampled_from(["none", "none", "before", "after"])

    def place(self, path: str) -> tuple[int, str]:
        """Where a path is; as the kernel walks: ENOTDIR through a file."""
        parent, _, name = path.rpartition("/")
        ino = self.world.walk(self.world.a, TOP).attr.ino
        for part in filter(None, parent.split("/")):
            entry = self.world.vfs.lookup(self.world.a, ino, part)
            if entry.attr.kind is not NodeKind.DIR:
                raise OSError(errno.ENOTDIR, path)
            ino = entry.attr.ino
        return ino, name

    @rule(path=st.sampled_from(PATHS), death=DEATHS)
    def mkdir(self, path: str, death: str) -> None:
        self.both(
            death,
            lambda caller: void(self.world.vfs.mkdir(caller, *self.place(path), 0o755)),
            lambda: (self.local / path).mkdir(),
        )

    @rule(path=st.sampled_from(PATHS), death=DEATHS)
    def rmdir(self, path: str, death: str) -> None:
        self.both(
            death,
            lambda caller: self.world.vfs.rmdir(caller, *self.place(path)),
            lambda: (self.local / path).rmdir(),
        )

    @rule(path=st.sampled_from(PATHS), death=DEATHS)
    def unlink(self, path: str, death: str) -> None:
        self.both(
            death,
            lambda caller: self.world.vfs.unlink(caller, *self.place(path)),
            lambda: (self.local / path).unlink(),
        )

    @rule(old=st.sampled_from(PATHS), new=st.sampled_from(PATHS), death=DEATHS)
    def rename(self, old: str, new: str, death: str) -> None:
        if new.startswith(old + "/") or old.startswith(new + "/"):
            # The kernel itself refuses these.
            return
        self.both(
            death,
            lambda caller: self.world.vfs.rename(caller, *self.place(old), *self.place(new), 0),
            lambda: (self.local / old).rename(self.local / new),
        )

    @rule(path=st.sampled_from(PATHS), death=DEATHS, text=st.binary(max_size=5))
    def create(self, path: str, death: str, text: bytes) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY

        def make(caller: Caller) -> None:
            _, opened = self.world.vfs.create(caller, *self.place(path), flags, 0o644)
            os.pwrite(opened.fd, text, 0)

        def make_local() -> None:
            with (self.local / path).open("xb") as stream:
                stream.write(text)

        self.both(death, make, make_local)

    @rule()
    def restart(self) -> None:
        """The mount process is killed while nothing is asked."""
        self.world.vfs = self.new_vfs(is_takeover=True)

    @invariant()
    def the_trees_are_equal(self) -> None:
        """I10, I11."""
        assert self.tree("") == {
            str(path.relative_to(self.local)): path.read_bytes() if path.is_file() else None
            for path in self.local.rglob("*")
        }

    def tree(self, below: str) -> dict[str, bytes | None]:
        """Path -> bytes, None for a directory."""
        found: dict[str, bytes | None] = {}
        for name in self.world.names(self.world.a, f"{TOP}/{below}".rstrip("/")):
            path = f"{below}/{name}".lstrip("/")
            entry = self.world.walk(self.world.a, f"{TOP}/{path}")
            if entry.attr.kind is NodeKind.DIR:
                found[path] = None
                found |= self.tree(path)
            else:
                found[path] = self.world.read(self.world.a, f"{TOP}/{path}")
        return found

    def teardown(self) -> None:
        self.spool.close()
        self.base.cleanup()


def void(_: object) -> None:
    """Drop a value."""


def test_the_name_space_is_like_a_plain_directory_over_restarts():
    """I10, I11: every request happens once, whenever the mount dies."""
    run_state_machine_as_test(
        InProcess,
        settings=settings(
            max_examples=10,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
