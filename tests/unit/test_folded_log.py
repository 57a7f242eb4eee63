"""What a folded log says: attempts, current checkpoints, pointers, pins."""

from __future__ import annotations

import pytest
from tests.unit.log_samples import (
    MANIFEST,
    A,
    B,
    C,
    Log,
    abort,
    fence,
    link,
    point,
    pointer,
    retire,
    saved,
    seal,
)

from ckptgate.errors import IntegrityError
from ckptgate.model.entries import (
    Hold,
    Pin,
    Published,
    Quarantine,
)
from ckptgate.model.rules import LATEST, AttemptPhase


def test_an_attempt_s_history_is_in_its_view() -> None:
    log = Log(fence(1), *saved("a.0", generation=1), Published(attempt="a.0"))
    view = log.state.attempts["a.0"]
    assert (view.name, view.state, view.generation) == ("a", "committed", 1)
    assert (view.seal_index, view.close_index, view.decision_index) == (1, 2, 3)
    assert view.manifest == MANIFEST
    assert view.is_published
    assert log.state.current == {"a": "a.0"}
    assert log.state.names == {"a"}
    assert log.state.generation_of("run:job-1") == 1
    assert log.state.generation_of("run:job-2") is None


def test_an_abort_says_what_was_missing() -> None:
    log = Log(seal("a.0"), abort("a.0"), abort("b.7"))
    assert log.state.attempts["a.0"].missing == ("a file",)
    assert log.state.attempts["b.7"].state is AttemptPhase.ABORTED
    assert log.state.attempts["b.7"].name == "b"
    assert log.state.attempts["b.7"].seal_index == -1
    assert not log.state.current


def test_what_is_sealed_and_not_decided_is_listed() -> None:
    log = Log(*A[:2], seal("b.0"), *C)
    assert log.state.undecided() == ("a.0", "b.0")
    log.append(abort("b.0"))
    log.append(A[2])
    assert log.state.undecided() == ()


def test_a_superseded_attempt_is_known_without_trying() -> None:
    log = Log(*A[:2], *saved("a.1"))
    assert log.state.is_superseded("a.0")
    assert not log.state.is_superseded("a.1")
    assert not log.state.is_superseded("unknown.0")


def test_a_save_again_replaces_the_older_one() -> None:
    log = Log(*A, *saved("a.1"))
    assert log.state.current == {"a": "a.1"}
    assert log.state.attempts["a.0"].state == "committed"


def test_current_checkpoints_come_in_the_order_of_their_commits() -> None:
    log = Log(*A, *B, *saved("a.1"))
    assert list(log.state.current) == ["b", "a"]


def test_every_commit_implies_latest() -> None:
    log = Log(*A, *B)
    assert log.state.pointers[LATEST].value == link("b")
    assert log.state.pointers[LATEST].source == log.state.attempts["b.0"].seal_index


def test_a_late_commit_of_an_older_seal_does_not_move_pointers_back() -> None:
    """I5."""
    log = Log(*A[:2], *B, A[2])
    assert log.state.current == {"b": "b.0", "a": "a.0"}
    assert log.state.pointers[LATEST].value.target == "b"


def test_a_framework_s_own_latest_keeps_its_form() -> None:
    log = Log(*saved("a.0", pointer("a")))
    assert log.state.pointers[LATEST].value == pointer("a")


def test_a_commit_without_latest_does_not_move_one_that_a_framework_owns() -> None:
    log = Log(*saved("a.0", pointer("a")), *B)
    assert log.state.pointers[LATEST].value == pointer("a")
    for entry in saved("c.0", pointer("c")):
        log.append(entry)
    assert log.state.pointers[LATEST].value == pointer("c")


def test_other_pointers_leave_latest_to_the_gateway() -> None:
    log = Log(*saved("a.0", pointer("a", "latest-rank0")))
    assert log.state.pointers[LATEST].value == link("a")
    assert log.state.pointers["latest-rank0"].value.target == "a"


def test_a_point_goes_back_and_the_next_commit_goes_forward_again() -> None:
    """I5: a rollback in the gateway's own form does not end its ownership."""
    log = Log(*A, *B, point(link("a")))
    assert log.state.pointers[LATEST].value == link("a")
    for entry in C:
        log.append(entry)
    assert log.state.pointers[LATEST].value == link("c")


def test_a_commit_of_what_was_sealed_before_a_point_does_not_undo_it() -> None:
    log = Log(*A, *B[:2], point(link("a")), B[2])
    assert log.state.pointers[LATEST].value == link("a")


def test_a_point_with_a_form_of_its_own_makes_the_name_a_framework_s() -> None:
    log = Log(*A, point(pointer("a")), *B)
    assert log.state.pointers[LATEST].value == pointer("a")


def test_a_checkpoint_called_latest_has_no_pointer_beside_it() -> None:
    log = Log(*saved("latest.0"), *A)
    assert LATEST not in log.state.pointers
    assert set(log.state.current) == {"latest", "a"}


def test_a_quarantined_checkpoint_stays_current_and_its_pointer_stays() -> None:
    log = Log(*A, Quarantine(name="a", reason="nan"))
    assert log.state.current == {"a": "a.0"}
    assert log.state.quarantined == {"a": "nan"}
    assert log.state.pointers[LATEST].value.target == "a"
    log.append(Quarantine(name="a", is_on=False))
    assert not log.state.quarantined


def test_a_quarantine_ends_with_the_content_that_it_was_about() -> None:
    log = Log(*A, Quarantine(name="a", reason="nan"), *saved("a.1"))
    assert not log.state.quarantined


def test_a_retired_name_is_gone_until_it_is_saved_again() -> None:
    log = Log(*A, *B, Quarantine(name="a"), retire("a.0"))
    assert log.state.current == {"b": "b.0"}
    assert log.state.retired == {"a": "a.0"}
    assert not log.state.quarantined
    for entry in saved("a.1"):
        log.append(entry)
    assert log.state.current == {"b": "b.0", "a": "a.1"}
    assert not log.state.retired


def test_pins_and_holds_are_switched() -> None:
    log = Log(*A, Pin(name="a"), Hold(reason="audit"))
    assert log.state.pins == {"a"}
    assert log.state.is_held
    log.append(Pin(name="a", is_on=False))
    log.append(Hold(is_on=False))
    assert not log.state.pins
    assert not log.state.is_held


@pytest.mark.parametrize(
    "changes", [{"index": 0}, {"index": 9}, {"previous": ""}, {"previous": "e" * 64}]
)
def test_a_record_out_of_its_place_is_not_folded(changes: dict[str, object]) -> None:
    """I7."""
    log = Log(*A)
    with pytest.raises(IntegrityError, match="does not follow"):
        log.state.apply(log.record(seal("b.0"), **changes), "f" * 64)
    assert "b.0" not in log.state.attempts
