"""What becomes of a save when power was lost in it, and of bytes that nobody vouches for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.gateway_harness import PID, Gateway

from ckptgate.engine.fetch import drop_copy
from ckptgate.engine.powerloss import BOOT_META, begin_boot, end_clean
from ckptgate.engine.verify import fold_log
from ckptgate.model.states import POWER_LOST, AttemptState, FileState
from ckptgate.ports.spool import AttemptRow, LocalBytes
from ckptgate.vfs.interface import Caller
from ckptgate_adapters.memory_store import MemoryStore
from ckptgate_adapters.sqlite_spool import SqliteSpool

CALLER = Caller(0, 0, PID, may_block=True)


@pytest.fixture
def gateway(tmp_path: Path):
    made = Gateway(tmp_path / "spool", MemoryStore())
    begin_boot(made.mount.spool, "before", made.events)
    yield made
    made.close()


def mkdir(gateway: Gateway, *paths: str) -> None:
    for path in paths:
        with gateway.request() as caller:
            gateway.mkdir(caller, path)


def put(gateway: Gateway, path: str, data: bytes = b"x" * 100) -> None:
    with gateway.request() as caller:
        fh = gateway.open_new(caller, path)
    os.pwrite(gateway.opened(fh).fd, data, 0)
    gateway.close_file(fh)


def save(gateway: Gateway, name: str = "step-1") -> None:
    mkdir(gateway, "run", f"run/{name}")
    put(gateway, f"run/{name}/a.bin")


def commit(gateway: Gateway, name: str = "step-1") -> None:
    with gateway.request() as caller:
        gateway.commit(caller, f"run/{name}")


def boot(gateway: Gateway, boot_id: str = "after") -> bool:
    """Begin all anew, as after a boot."""
    gateway.kill_mount()
    gateway.kill_publisher()
    spool = SqliteSpool.attach(str(gateway.spool_path))
    is_lost = begin_boot(spool, boot_id, gateway.events)
    spool.close()
    gateway.start_publisher()
    gateway.start_mount(is_takeover=False)
    return is_lost


def row_of(gateway: Gateway, name: str = "step-1") -> AttemptRow:
    return gateway.engine.spool.attempts(name=name)[-1]


def told(gateway: Gateway) -> list[tuple[str, str]]:
    return [(event.kind, event.subject) for event in gateway.events.recent(100)]


def until_sealed(gateway: Gateway) -> AttemptRow:
    for _ in range(50):
        gateway.publisher.step()
        gateway.clock.advance(1.0)
        row = row_of(gateway)
        if row.seal_index >= 0:
            assert not row.is_voted
            return row
    raise AssertionError(row)


def test_what_was_being_written_is_given_up_with_the_reason(gateway):
    """I11: its newest names may be missing: nobody may take it for whole."""
    save(gateway)
    assert boot(gateway)
    row = row_of(gateway)
    assert row.state is AttemptState.ABANDONED
    assert POWER_LOST in row.reason
    assert ("power-lost", "run/step-1") in told(gateway)
    (found,) = gateway.engine.spool.files_of_attempt(row.id)
    assert Path(gateway.engine.spool.data_path(found[2].file)).read_bytes() == b"x" * 100
    gateway.settle()
    assert fold_log(gateway.store, "run").current == {}


def test_a_commit_that_was_asked_for_names_the_files_that_were_not_on_disk(gateway):
    """I11."""
    save(gateway)
    commit(gateway)
    boot(gateway)
    row = row_of(gateway)
    assert row.state is AttemptState.ABANDONED
    assert "before a.bin were on disk" in row.reason


def test_a_sealed_attempt_whose_bytes_may_be_lost_is_aborted_in_the_log_at_once(gateway):
    """I3, I11: nobody waits for the deadline."""
    save(gateway)
    commit(gateway)
    row = until_sealed(gateway)
    (found,) = gateway.engine.spool.files_of_attempt(row.id)
    gateway.engine.spool.update_file(found[2].file, state=FileState.QUIET)
    began = gateway.clock.monotonic()
    boot(gateway)
    gateway.settle()
    row = row_of(gateway)
    assert row.state is AttemptState.ABORTED
    assert POWER_LOST in row.reason
    assert gateway.clock.monotonic() - began < 60
    assert fold_log(gateway.store, "run").undecided() == ()


def test_what_was_digested_after_its_commit_was_asked_for_is_committed(gateway):
    """I10: a digest's bytes are on disk, and the SEAL came after all names."""
    save(gateway)
    commit(gateway)
    until_sealed(gateway)
    boot(gateway)
    gateway.settle()
    assert gateway.outcome("run")["committed"] == {"step-1": {"a.bin": b"x" * 100}}


def test_a_local_copy_that_changed_is_let_go_where_the_store_has_the_bytes(gateway):
    """I1: the store's bytes were verified; what the disk has now doesn't count."""
    save(gateway)
    commit(gateway)
    row = until_sealed(gateway)
    (found,) = gateway.engine.spool.files_of_attempt(row.id, states=(FileState.STORED,))
    Path(gateway.engine.spool.data_path(found[2].file)).write_bytes(b"")
    boot(gateway)
    gateway.settle()
    assert gateway.outcome("run")["committed"] == {"step-1": {"a.bin": b"x" * 100}}
    assert gateway.read("run/step-1/a.bin") == b"x" * 100


@pytest.mark.parametrize("ended", ["power", "power-half-read", "clean"])
def test_what_was_fetched_is_believed_only_if_power_was_not_lost_since(gateway, ended):
    """I1, I10: no reader waited until it was on disk, so its size and times prove nothing."""
    save(gateway)
    commit(gateway)
    gateway.settle()
    (found,) = gateway.engine.spool.files_of_attempt(row_of(gateway).id)
    file = found[2].file
    path = Path(gateway.engine.spool.data_path(file))
    drop_copy(gateway.engine.spool, found[2])
    assert gateway.read("run/step-1/a.bin") == b"x" * 100
    fetched = gateway.engine.spool.file(file)
    assert fetched.local is LocalBytes.FULL
    if ended == "power-half-read":
        # As if its last chunk had not come yet.
        gateway.engine.spool.update_file(file, local=LocalBytes.PARTIAL)
    if ended == "clean":
        end_clean(gateway.mount.spool)
    else:
        path.write_bytes(bytes(100))
        os.utime(path, ns=(fetched.mtime_ns, fetched.mtime_ns))
    assert boot(gateway) is (ended != "clean")
    now = gateway.engine.spool.file(file)
    assert now.local is (LocalBytes.FULL if ended == "clean" else LocalBytes.NONE)
    assert now.have == b""
    assert gateway.read("run/step-1/a.bin") == b"x" * 100


@pytest.mark.parametrize("is_clean", [True, False], ids=["other-boot-after-a-clean-end", "same"])
def test_without_a_power_loss_nothing_is_given_up(gateway, is_clean):
    """I10: a restart under the same boot, or after a clean end, goes on."""
    save(gateway)
    commit(gateway)
    if is_clean:
        end_clean(gateway.mount.spool)
        assert gateway.mount.spool.get_meta(BOOT_META) is None
    assert not boot(gateway, "after" if is_clean else "before")
    gateway.settle()
    assert row_of(gateway).state is AttemptState.COMMITTED


def test_a_whole_file_that_was_not_on_disk_is_not_published(gateway):
    """I8, I11: others keep the version before it."""
    mkdir(gateway, "run")
    put(gateway, "run/model.npz", b"PK\5\6" + bytes(18))
    boot(gateway)
    gateway.settle()
    assert ("power-lost", "run/model.npz") in told(gateway)
    assert [entry.name for entry in gateway.store.plain_list("run")] == []


def test_a_write_that_failed_and_was_ignored_is_no_part_of_a_commit(gateway):
    """I1: the writer was told, and committed nevertheless."""
    mkdir(gateway, "run", "run/step-1")
    with gateway.request() as caller:
        fh = gateway.open_new(caller, "run/step-1/a.bin")
    os.pwrite(gateway.opened(fh).fd, b"half", 0)
    gateway.vfs.write_failed(CALLER, fh, 28)
    gateway.close_file(fh)
    commit(gateway)
    for _ in range(30):
        gateway.publisher.step()
        gateway.clock.advance(1.0)
    assert any("a write failed: No space left" in line for line in row_of(gateway).missing)
    assert gateway.outcome("run")["committed"] == {}
    for _ in range(60):
        gateway.publisher.step()
        gateway.clock.advance(30.0)
    assert row_of(gateway).state is AttemptState.ABORTED


def test_a_write_that_was_repeated_after_it_failed_counts(gateway):
    """I10."""
    mkdir(gateway, "run", "run/step-1")
    with gateway.request() as caller:
        fh = gateway.open_new(caller, "run/step-1/a.bin")
    fd = gateway.opened(fh).fd
    os.pwrite(fd, b"half", 0)
    gateway.vfs.write_failed(CALLER, fh, 28)
    os.pwrite(fd, b"a whole", 0)
    gateway.close_file(fh)
    commit(gateway)
    gateway.settle()
    assert gateway.outcome("run")["committed"] == {"step-1": {"a.bin": b"a whole"}}


def test_a_failed_fsync_is_told_and_the_file_counts_only_once_it_is_written_again(
    gateway, monkeypatch
):
    """I11: the kernel forgets what it could not write; a second fsync proves nothing."""
    mkdir(gateway, "run", "run/step-1")
    with gateway.request() as caller:
        fh = gateway.open_new(caller, "run/step-1/a.bin")
    os.pwrite(gateway.opened(fh).fd, b"lost", 0)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            gateway.vfs.fsync(CALLER, fh, data_only=False)
    gateway.vfs.fsync(CALLER, fh, data_only=False)
    gateway.close_file(fh)
    commit(gateway)
    for _ in range(30):
        gateway.publisher.step()
        gateway.clock.advance(1.0)
    assert gateway.outcome("run")["committed"] == {}
    assert any("fsync failed" in line for line in row_of(gateway).missing)
