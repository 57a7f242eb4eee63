"""Power loss of the spool's disk, write by write: any part of what wasn't synced may be missing.

One process saves under strace. Its system calls are replayed up to a moment, unsynced writes and
changes of directories are dropped in any combination (`power/replay.py`), and a gateway is begun on
what is left, as after a boot.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3
from tests.fault.power.recorded import FILES, STEPS, FarStore, config, content
from tests.fault.power.replay import Loss, Recording, losses, restore
from tests.fault.power.trace import CALLS
from tests.gateway_harness import Gateway

from ckptgate.engine.events import Events
from ckptgate.engine.powerloss import begin_boot
from ckptgate.engine.settings import PublisherSettings
from ckptgate.engine.verify import fold_log
from ckptgate.errors import CkptError, MissingError
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate_adapters.sqlite_spool import SqliteSpool

RECORDED = Path(__file__).parent / "power/recorded.py"
SAMPLE = 80
WHOLE = {name: {path: content(f"{name}/{path}") for path in FILES} for name in STEPS}


@pytest.fixture(scope="module")
def recording(require, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The calls of the process, from its start to its end."""
    require(shutil.which("strace"), "strace is not installed")
    base = tmp_path_factory.mktemp("recorded")
    spool, far, noted = base / "spool", base / "far", base / "noted"
    far.mkdir()
    words = ["strace", "-f", "-qq", "-xx", "-s", "1000000", "-e", f"trace={CALLS}"]
    paths = (base / "trace", sys.executable, RECORDED, spool, far, noted)
    command = [*words, "-o", *map(str, paths)]
    done = subprocess.run(
        command,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(p or "." for p in sys.path)),
        capture_output=True,
        text=True,
        check=False,
    )
    require("PTRACE_TRACEME" not in done.stderr, "strace may not trace here")
    assert done.returncode == 0, done.stderr
    return Recording(base / "trace", str(spool), far=str(far), noted=str(noted))


@dataclass
class Survivor:
    """The node after its boot."""

    gateway: Gateway
    promises: list[list[str]]

    def check_database(self) -> None:
        connection = sqlite3.connect(self.gateway.mount.spool.path + "/spool.db")
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()

    def kept(self) -> dict[str, bytes]:
        """Every file of every attempt in the spool, whatever became of it."""
        spool = self.gateway.engine.spool
        found: dict[str, bytes] = {}
        for row in spool.attempts():
            for path, _, file in spool.files_of_attempt(row.id):
                place = Path(spool.data_path(file.file))
                if place.exists():
                    found[f"{row.name}/{path}"] = place.read_bytes()
                if file.state in {FileState.OPEN, FileState.QUIET}:
                    assert place.exists(), f"{path} has a row and no bytes"
        return found

    def check_promises(self) -> None:
        kept = self.kept()
        committed = self.gateway.outcome("run")["committed"]
        for kind, what in self.promises:
            if kind == "file":
                name, _, path = what.partition("/")
                places = [kept.get(what), committed.get(name, {}).get(path)]
                assert any(places), f"{what} is gone"
                assert all(data in {None, content(what)} for data in places), what
            elif kind == "committed":
                assert what in committed

    def check_config(self) -> None:
        """A file that is replaced by a rename is the old or the new one, never less."""
        promised = max((int(what) for kind, what in self.promises if kind == "config"), default=0)
        try:
            data = self.gateway.read("config.json")
        except MissingError:
            assert not promised
            return
        versions = [version for version in range(1, 5) if config(version) == data]
        assert versions, f"config.json is torn: {data[:30]!r}, {len(data)} bytes"
        assert versions[0] >= promised

    def check_attempts(self) -> None:
        """Whole and committed, or refused with a reason; never half."""
        state = fold_log(self.gateway.store, "run")
        assert not state.undecided()
        for name, files in self.gateway.outcome("run")["committed"].items():
            assert files == WHOLE[name], name
        for row in self.gateway.attempts():
            assert row.state not in UNDECIDED, (row.name, row.reason, row.missing)
            if row.state in {AttemptState.ABANDONED, AttemptState.ABORTED}:
                assert row.reason


def keep_times(spool: SqliteSpool) -> None:
    """Give digested files the times that their rows know: a replay can't set them.

    A digest's bytes were synced before it was noted, so they must be what the row says.
    """
    for file in spool.files_in((FileState.DIGESTED, FileState.STORED)):
        place = Path(spool.data_path(file.file))
        if not place.exists():
            continue
        assert blake3(place.read_bytes()).hexdigest() == file.digest, f"file {file.file}"
        found = place.stat()
        spool.update_file(file.file, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns)


def survive(recording: Recording, loss: Loss, base: Path) -> None:
    restore(recording, loss, base)
    promises = [line.split() for at, line in recording.notes if at <= loss.at]
    spool, far = base / "disk", base / "far"
    try:
        opened = SqliteSpool.create_or_open(str(spool), store_url="test:", host="node")
    except CkptError:
        # Not even the spool itself was durable yet.
        assert not promises
        return
    keep_times(opened)
    begin_boot(opened, "after", Events())
    opened.drop_orphans()
    opened.close()
    settings = PublisherSettings(
        job_wait_s=20.0, digest_threads=1, upload_threads=1, spool_free_min_share=0.0,
        commit_deadline_s=60.0, abandon_after_s=60.0,
    )  # fmt: skip
    gateway = Gateway(spool, FarStore(str(far)), settings=settings)
    gateway.identify.is_dead = True
    survivor = Survivor(gateway, promises)
    survivor.check_database()
    survivor.check_config()
    gateway.settle(rounds=300)
    survivor.check_promises()
    survivor.check_attempts()
    survivor.check_config()
    survivor.check_database()
    gateway.close()


def survive_all(recording: Recording, chosen: list[Loss]) -> None:
    for loss in chosen:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
            (Path(base) / "disk").mkdir()
            (Path(base) / "far").mkdir()
            try:
                survive(recording, loss, Path(base))
            except BaseException:
                print(f"after {loss}")
                raise


def test_the_recording_holds_what_it_has_to(recording: Recording):
    """Without syncs and promises nothing would be tested."""
    assert len(recording.syncs) > 20
    kinds = {line.split()[0] for _, line in recording.notes}
    assert kinds == {"file", "config", "committed"}
    assert {sync.path.rpartition("/")[2] for sync in recording.syncs} >= {"spool.db-wal"}


def test_any_part_of_what_was_not_synced_may_be_missing(recording: Recording):
    """I11, I10: what was promised is there, the database is whole, nothing half is committed."""
    survive_all(recording, losses(recording, SAMPLE, seed=1))


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(4))
def test_at_every_sync_any_part_may_be_missing(recording: Recording, seed: int):
    """I11, I10: every moment of the recording around a sync or a promise."""
    survive_all(recording, losses(recording, 1_000_000, seed))
