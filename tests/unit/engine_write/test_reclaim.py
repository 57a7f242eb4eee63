"""What reclaiming removes from store and spool, when, and what never."""

from __future__ import annotations

import os
from pathlib import Path

from tests.engine_harness import RUN, Cluster, StagedNode

from ckptgate.engine.sightings import Reclaimed
from ckptgate.errors import RefusedError
from ckptgate.model.entries import Hold, Pin, Quarantine
from ckptgate.model.layout import attempt_prefix
from ckptgate.model.reclaim import Part
from ckptgate.model.states import AttemptState
from ckptgate.ports.spool import NO_FILE, AttemptRow, HandleRow, TombstoneRow
from ckptgate.testing.faults import FaultPlan, FaultyStore
from ckptgate_adapters.memory_store import MemoryStore

DAY_S = 24 * 3600.0


def save(cluster: Cluster, node: StagedNode, name: str, *, base: AttemptRow | None = None,
         **files: bytes) -> AttemptRow:  # fmt: skip
    row = node.begin(name, base=base)
    for path, data in (files or {"w": name.encode() * 100}).items():
        node.write(row, f"{path}.txt", data, rank=0)
    node.commit(row)
    cluster.settle()
    row = node.fresh(row)
    assert row.state is AttemptState.COMMITTED, (row.reason, row.missing)
    return row


def delete(cluster: Cluster, node: StagedNode, row: AttemptRow) -> None:
    """rm -rf of a committed checkpoint."""
    node.raw.add_tombstone(
        TombstoneRow(id=0, run=RUN, name=row.name, attempt=row.attempt, job_key=row.job_key)
    )
    cluster.settle()


def parts(cluster: Cluster, attempt: str) -> list[str]:
    return [part.key for part in cluster.store.attempt_parts(RUN, attempt)]


def gone(found: list[Reclaimed]) -> set[tuple[str, str, str]]:
    return {(item.place, item.what, item.why) for item in found}


def sweep(node: StagedNode, grace_s: float = 0.0, *, is_dry: bool = False) -> list[Reclaimed]:
    return node.publisher.sweep(None, grace_s=grace_s, is_dry=is_dry)


def spool_files(node: StagedNode) -> int:
    node.raw.finish_removals()
    return sum(len(names) for _, _, names in os.walk(os.path.join(node.raw.path, "data")))


def test_what_is_replaced_goes_after_its_grace_and_not_before(cluster: Cluster) -> None:
    """I9: the bytes that a COMMIT names stay until the log says that they go."""
    node = cluster.node("a")
    save(cluster, node, "step-1", w=b"old" * 100)
    save(cluster, node, "step-1", w=b"new" * 100)
    assert sweep(node, DAY_S) == []
    before = parts(cluster, "step-1.0")
    cluster.clock.advance(DAY_S - 60)
    assert sweep(node, DAY_S) == []
    assert parts(cluster, "step-1.0") == before
    cluster.clock.advance(120)
    found = sweep(node, DAY_S)
    assert ("store", "step-1.0", "replaced") in gone(found)
    assert parts(cluster, "step-1.0") == []
    assert cluster.state().attempts["step-1.0"].is_reclaimed
    assert cluster.files("step-1") == {"w.txt": b"new" * 100}
    cluster.check_invariants()
    assert sweep(node, DAY_S) == []


def test_the_publisher_does_it_by_itself(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1", w=b"old")
    save(cluster, node, "step-1", w=b"new")
    for _ in range(5):
        node.step()
        cluster.clock.advance(DAY_S / 3)
    assert parts(cluster, "step-1.0") == []
    assert [row.attempt for row in node.raw.attempts()] == ["step-1.1"]
    assert "reclaimed" in node.kinds()
    cluster.check_invariants()


class Locking(FaultyStore):
    """Doesn't let one of an attempt's objects go."""

    locked = ""

    def reclaim(self, run: str, part: Part) -> int:
        if part.key == self.locked:
            raise RefusedError(f"{part.key!r} is locked", subject=part.key)
        return super().reclaim(run, part)


def test_what_the_store_does_not_let_go_is_told_and_looked_at_a_day_later(
    cluster: Cluster,
) -> None:
    store = Locking(cluster.store, FaultPlan(at=0))
    node = cluster.node("a", store=store)
    save(cluster, node, "step-1", w=b"old" * 100, x=b"more")
    save(cluster, node, "step-1", w=b"new" * 100)
    store.locked = next(key for key in parts(cluster, "step-1.0") if "/data/" in key)
    sweep(node)
    assert parts(cluster, "step-1.0") == [store.locked]
    assert node.kinds().count("not-reclaimed") == 1
    store.locked = ""
    cluster.clock.advance(2 * DAY_S)
    sweep(node)
    assert parts(cluster, "step-1.0") == []
    cluster.check_invariants()


def test_a_dry_run_says_what_would_go_and_changes_nothing(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1", w=b"old" * 100)
    save(cluster, node, "step-1", w=b"new" * 100)
    store = cluster.store
    assert isinstance(store, MemoryStore)
    before, rows = store.keys(), node.raw.attempts()
    said = sweep(node, is_dry=True)
    assert store.keys() == before
    assert node.raw.attempts() == rows
    assert gone(said) == gone(sweep(node))
    assert sum(item.size for item in said if item.place == "store") > 300
    assert store.keys() != before


def test_a_deleted_checkpoint_goes_and_its_directory_with_it(cluster: Cluster) -> None:
    node = cluster.node("a")
    first = save(cluster, node, "step-1")
    save(cluster, node, "step-2")
    delete(cluster, node, first)
    assert "step-1" not in cluster.state().current
    assert ("store", "step-1.0", "retired") in gone(sweep(node))
    assert parts(cluster, "step-1.0") == []
    assert node.raw.attempt(first.id) is None
    cluster.check_invariants()


def test_the_newest_good_checkpoint_is_kept_whoever_deletes_it(cluster: Cluster) -> None:
    """Also where it isn't the newest, because the newest is quarantined."""
    node = cluster.node("a")
    first = save(cluster, node, "step-1")
    second = save(cluster, node, "step-2")
    node.logs.get(RUN).append(lambda _: Quarantine(name="step-2", reason="loss went up"))
    for row in (first, second):
        delete(cluster, node, row)
    sweep(node)
    assert set(cluster.state().current) == {"step-1", "step-2"}
    cluster.check_invariants()


def test_a_retired_one_is_the_last_good_one_again_if_all_newer_are_bad(cluster: Cluster) -> None:
    node = cluster.node("a")
    first = save(cluster, node, "step-1")
    save(cluster, node, "step-2")
    delete(cluster, node, first)
    node.logs.get(RUN).append(lambda _: Quarantine(name="step-2", reason="loss went up"))
    before = parts(cluster, "step-1.0")
    sweep(node)
    assert parts(cluster, "step-1.0") == before != []


def test_a_pinned_name_keeps_its_older_versions_too(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1", w=b"old")
    log = node.logs.get(RUN)
    log.append(lambda _: Pin(name="step-1"))
    save(cluster, node, "step-1", w=b"new")
    before = parts(cluster, "step-1.0")
    sweep(node)
    assert parts(cluster, "step-1.0") == before
    log.append(lambda _: Pin(name="step-1", is_on=False))
    sweep(node)
    assert parts(cluster, "step-1.0") == []


def test_a_held_run_loses_nothing_neither_in_the_store_nor_in_the_spool(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1", w=b"old")
    save(cluster, node, "step-1", w=b"new")
    node.logs.get(RUN).append(lambda _: Hold(reason="audit"))
    before, rows = parts(cluster, "step-1.0"), node.raw.attempts()
    assert sweep(node) == []
    assert (parts(cluster, "step-1.0"), node.raw.attempts()) == (before, rows)
    node.logs.get(RUN).append(lambda _: Hold(is_on=False))
    assert sweep(node) != []


def test_bytes_that_a_newer_revision_shares_stay_and_the_others_go(cluster: Cluster) -> None:
    """I9: what is reachable is judged by the manifests, not by whose directory it lies in."""
    node = cluster.node("a")
    first = save(cluster, node, "step-1", kept=b"k" * 100, dropped=b"d" * 100)
    second = save(cluster, node, "step-1", base=first, dropped=b"new" * 50)
    third = save(cluster, node, "step-1", base=second, extra=b"x")
    sweep(node)
    state = cluster.state()
    assert state.attempts["step-1.0"].is_reclaimed
    assert state.attempts["step-1.1"].is_reclaimed
    assert [key for key in parts(cluster, "step-1.0") if "/data/" not in key] == []
    assert len(parts(cluster, "step-1.0")) == len(parts(cluster, "step-1.1")) == 1
    assert set(cluster.files("step-1")) == {"kept.txt", "dropped.txt", "extra.txt"}
    cluster.check_invariants()
    save(cluster, node, "step-2")
    delete(cluster, node, third)
    sweep(node)
    assert all(parts(cluster, f"step-1.{k}") == [] for k in range(3))


def test_what_is_being_revised_stays_until_the_revision_is_decided(cluster: Cluster) -> None:
    node = cluster.node("a")
    first = save(cluster, node, "step-1", kept=b"k" * 100)
    revision = node.begin("step-1", base=first)
    node.write(revision, "more.txt", b"m", rank=0)
    save(cluster, node, "step-1", w=b"new")
    sweep(node)
    assert not cluster.state().attempts["step-1.0"].is_reclaimed
    assert node.raw.attempt(first.id) is not None
    node.commit(revision)
    cluster.settle()
    assert set(cluster.files("step-1")) == {"kept.txt", "more.txt"}
    cluster.check_invariants()


def test_a_revision_of_what_is_reclaimed_never_commits(cluster: Cluster) -> None:
    """I1: another node took the base away while the reviser was cut off from it."""
    a, b = cluster.node("a"), cluster.node("b")
    first = save(cluster, a, "step-1", kept=b"k" * 100)
    revision = a.begin("step-1", base=first)
    a.write(revision, "more.txt", b"m", rank=0)
    newer = b.begin("step-1", job="run:job-2")
    b.write(newer, "w.txt", b"new", rank=0)
    b.commit(newer)
    cluster.settle(b)
    sweep(b)
    assert cluster.state().attempts["step-1.0"].is_reclaimed
    a.commit(revision)
    cluster.settle(rounds=1200)
    assert cluster.state().current == {"step-1": b.fresh(newer).attempt}
    assert a.fresh(revision).state in {AttemptState.ABORTED, AttemptState.ABANDONED}
    assert Path(a.raw.data_path(1)).parent.exists()
    cluster.check_invariants()


def test_an_aborted_attempt_goes_and_its_number_is_never_used_again(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1")
    node.write(row, "w.txt", b"bad" * 100, rank=0)
    for _ in range(5):
        node.step()
    node.publisher.request_abort(row.id, "test")
    assert node.fresh(row).state is AttemptState.ABORTED
    files = spool_files(node)
    sweep(node)
    assert parts(cluster, "step-1.0") == []
    assert cluster.store.children(attempt_prefix(RUN, "step-1.0")) == ["intent.json"]
    assert node.raw.attempt(row.id) is None
    assert spool_files(node) == files - 1
    assert save(cluster, node, "step-1").attempt == "step-1.1"


def test_what_was_given_up_stays_in_the_spool_as_evidence_for_longer(cluster: Cluster) -> None:
    node = cluster.node("a")
    row = node.begin("step-1")
    node.write(row, "w.txt", b"bad", rank=0)
    for _ in range(5):
        node.step()
    node.publisher.request_abort(row.id, "test")
    for days in (0, 3):
        cluster.clock.advance(days * DAY_S)
        node.publisher.sweep(None)
    assert parts(cluster, "step-1.0") == []
    assert node.raw.attempt(row.id) is not None
    cluster.clock.advance(5 * DAY_S)
    node.publisher.sweep(None)
    assert node.raw.attempt(row.id) is None


def test_a_zombie_that_comes_back_is_cleaned_up_again(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1", w=b"old")
    save(cluster, node, "step-1", w=b"new")
    sweep(node)
    zombie = f"{RUN}/.ckptgate/attempts/step-1.0/data/zombie-0000000b/7"
    cluster.store.create(zombie, b"late")
    assert [item.count for item in sweep(node)] == [1]
    assert parts(cluster, "step-1.0") == []


def test_bytes_of_a_late_member_in_a_committed_checkpoint_go(cluster: Cluster) -> None:
    """They are in no manifest, and can't get into one."""
    node = cluster.node("a")
    save(cluster, node, "step-1")
    before = parts(cluster, "step-1.0")
    cluster.store.create(f"{RUN}/.ckptgate/attempts/step-1.0/data/late-0000000c/1", b"late")
    assert gone(sweep(node)) == {("store", "step-1.0", "not in any manifest")}
    assert parts(cluster, "step-1.0") == before
    cluster.check_invariants()


def test_an_open_attempt_of_another_node_is_left_alone_whatever_the_grace(
    cluster: Cluster,
) -> None:
    a, b = cluster.node("a"), cluster.node("b")
    row = b.begin("step-1", job="session:b/1@2")
    b.write(row, "w.txt", b"b" * 100, rank=0)
    for _ in range(5):
        b.step()
    assert b.fresh(row).is_joined
    a.directory()
    before = parts(cluster, "step-1.0")
    assert sweep(a) == []
    assert parts(cluster, "step-1.0") == before
    b.commit(row)
    cluster.settle()
    cluster.check_invariants()
    assert "step-1" in cluster.state().current


def test_an_attempt_that_nobody_comes_back_to_is_aborted_then_removed(cluster: Cluster) -> None:
    """I3: the ABORT is in the log before anything goes, so nobody can commit it any more."""
    a, b = cluster.node("a"), cluster.node("b")
    row = b.begin("step-1", job="session:b/1@2")
    b.write(row, "w.txt", b"b" * 100, rank=0)
    for _ in range(5):
        b.step()
    a.directory()
    for days in (0, 6, 2):
        assert "step-1.0" not in cluster.state().attempts
        cluster.clock.advance(days * DAY_S)
        a.publisher.sweep(None)
    assert "step-1.0" in cluster.state().attempts
    assert parts(cluster, "step-1.0") != []
    cluster.clock.advance(DAY_S + 1)
    a.publisher.sweep(None)
    assert parts(cluster, "step-1.0") == []
    b.commit(row)
    cluster.settle()
    assert b.fresh(row).state is AttemptState.ABORTED
    assert Path(b.raw.data_path(b.raw.files_of_attempt(row.id)[0][2].file)).exists()


def test_what_an_older_incarnation_left_is_aborted_after_the_grace(cluster: Cluster) -> None:
    a = cluster.node("a")
    old = a.begin("step-1")
    a.write(old, "w.txt", b"old", rank=0)
    for _ in range(5):
        a.step()
    new = a.begin("step-2", job="run:job-2")
    a.write(new, "w.txt", b"new", rank=0)
    a.commit(new)
    cluster.settle()
    assert a.fresh(old).state is AttemptState.ABANDONED
    sweep(a)
    assert parts(cluster, "step-1.0") == []
    assert a.raw.attempt(old.id) is None


def test_a_step_of_the_wall_clock_makes_nothing_old(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1", w=b"old")
    save(cluster, node, "step-1", w=b"new")
    sweep(node, DAY_S)
    node.raw.set_meta(
        f"sightings.run:{RUN}",
        (node.raw.get_meta(f"sightings.run:{RUN}") or "").replace('"at_ns":1', '"at_ns":0'),
    )
    again = cluster.node("a")
    assert sweep(again, DAY_S) == []
    assert parts(cluster, "step-1.0") != []


def test_an_old_version_that_somebody_reads_here_stays_until_it_is_closed(
    cluster: Cluster,
) -> None:
    node = cluster.node("a")
    old = save(cluster, node, "step-1", w=b"old")
    ((_, file_node, file),) = node.raw.files_of_attempt(old.id)
    node.raw.add_handle(HandleRow(fh=7, ino=file_node.ino, file=file.file, pid=0, start=0,
                                  is_closed=True))  # fmt: skip
    save(cluster, node, "step-1", w=b"new")
    assert file.file != NO_FILE
    assert sweep(node) == []
    assert Path(node.raw.data_path(file.file)).read_bytes() == b"old"
    assert parts(cluster, "step-1.0") != []
    node.raw.drop_handle(7)
    sweep(node)
    assert parts(cluster, "step-1.0") == []
    assert node.raw.attempt(old.id) is None


def test_files_without_a_row_and_rows_that_nothing_refers_to_go(cluster: Cluster) -> None:
    node = cluster.node("a")
    save(cluster, node, "step-1")
    stray = Path(node.raw.data_path(99_999_999))
    stray.write_bytes(b"killed in between")
    row = node.raw.add_file()
    Path(node.raw.data_path(row.file)).write_bytes(b"half a copy")
    assert gone(sweep(node)) == {("spool", "files", "not in the database")}
    assert not stray.exists()
    assert node.raw.file(row.file) is not None
    cluster.clock.advance(DAY_S + 1)
    Path(node.raw.data_path(row.file)).write_bytes(b"a longer half of a copy")
    assert sweep(node) == []
    cluster.clock.advance(DAY_S + 1)
    assert gone(sweep(node)) == {("spool", "files", "nothing refers to them")}
    assert node.raw.file(row.file) is None
    cluster.check_invariants()


def test_two_gateways_reclaim_the_same_at_once(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b")
    save(cluster, a, "step-1", w=b"old")
    save(cluster, a, "step-1", w=b"new")
    b.directory()
    mine = a.publisher._reclaimer._store.round(RUN, _now(), is_full=True)
    other = b.publisher._reclaimer._store.round(RUN, _now(), is_full=True)
    next(mine)
    list(other)
    list(mine)
    assert parts(cluster, "step-1.0") == []
    reclaims = [v for v in cluster.state().attempts.values() if v.is_reclaimed]
    assert len(reclaims) == 1
    cluster.check_invariants()


def _now():
    from ckptgate.engine.sightings import Graces

    return Graces(grace_s=0.0, unfinished_s=0.0, evidence_s=0.0, lost_s=DAY_S)
