"""States in the spool."""

from __future__ import annotations

import itertools

import pytest

from ckptgate.errors import RefusedError
from ckptgate.model.states import (
    ATTEMPT_TRANSITIONS,
    FILE_TRANSITIONS,
    AttemptState,
    FileState,
    advance_attempt,
    advance_file,
)


def test_every_state_has_a_row() -> None:
    assert set(FILE_TRANSITIONS) == set(FileState)
    assert set(ATTEMPT_TRANSITIONS) == set(AttemptState)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(FileState, FileState)))
def test_a_file_goes_only_where_the_table_says(old: FileState, new: FileState) -> None:
    if new is old or new in FILE_TRANSITIONS[old]:
        assert advance_file(old, new) is new
    else:
        with pytest.raises(RefusedError, match=f"{old} cannot become {new}"):
            advance_file(old, new)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(AttemptState, AttemptState)))
def test_an_attempt_goes_only_where_the_table_says(old: AttemptState, new: AttemptState) -> None:
    if new is old or new in ATTEMPT_TRANSITIONS[old]:
        assert advance_attempt(old, new) is new
    else:
        with pytest.raises(RefusedError, match=f"{old} cannot become {new}"):
            advance_attempt(old, new)


def test_a_file_is_stored_only_after_its_digest_is_known() -> None:
    before = {state for state in FileState if FileState.STORED in FILE_TRANSITIONS[state]}
    assert before == {FileState.DIGESTED}


def test_a_decision_is_never_taken_back() -> None:
    """I3."""
    for decided in (AttemptState.ABORTED, AttemptState.ABANDONED):
        assert not ATTEMPT_TRANSITIONS[decided]
    for decided in (AttemptState.COMMITTED, AttemptState.REPLACED):
        assert ATTEMPT_TRANSITIONS[decided] <= {AttemptState.COMMITTED, AttemptState.REPLACED}
