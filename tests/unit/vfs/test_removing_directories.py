"""Which plain directories can be removed."""

from __future__ import annotations

import errno

import pytest

from ckptgate.errors import CkptError
from ckptgate.model.states import AttemptState


@pytest.mark.parametrize("here", [True, False], ids=["an-attempt-here", "a-log-in-the-store"])
def test_a_directory_in_which_a_checkpoint_began_is_not_removed(world, here):
    """It could not go from the store, which has the run's log in it."""
    world.mkdir(world.a, "run")
    world.mkdir(world.a, "other")
    if here:
        world.mkdir(world.a, "run/step-1")
        world.rmdir(world.a, "run/step-1")
    else:
        world.catalog.set_view("run", length=3)
    assert world.names(world.a, "run") == []
    with pytest.raises(CkptError, match="keeps what was decided") as caught:
        world.rmdir(world.a, "run")
    assert caught.value.errno == errno.ENOTEMPTY
    assert caught.value.hint
    world.rmdir(world.a, "other")
    assert world.names(world.b, "") == ["run"]


def test_a_checkpoint_whose_vote_says_that_nothing_is_here_is_removed_at_once(world):
    """Of several members others may decide it for minutes; none of it is here."""
    world.mkdir(world.s, "step-1")
    row = world.attempt("step-1")
    world.spool.update_attempt(
        row.id, attempt="step-1.0", state=AttemptState.SEALED, is_joined=True, seal_index=3
    )
    world.spool.update_attempt(row.id, is_voted=True)
    before = world.clock.monotonic()
    world.rmdir(world.s, "step-1")
    assert world.clock.monotonic() - before < 1
    assert world.spool.attempt(row.id).state is AttemptState.ABANDONED
    assert not world.exists(world.s, "step-1")
