"""What a file costs of the spool's database: statements are counted, since their time isn't ours.

Of many files in a row; what only every hundredth needs is allowed for.
"""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest

from ckptgate.errors import MissingError
from ckptgate.vfs.interface import Caller

FILES = 100
NEVER_S = 3600.0


@pytest.fixture
def seen(world) -> list[str]:
    """The statements since it was last cleared, without those of triggers."""
    world.vfs._ctx.settings = replace(world.vfs._ctx.settings, close_delay_s=NEVER_S)
    world.vfs.start_session(is_takeover=False)
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/first", b"1")
    found: list[str] = []

    def trace(sql: str) -> None:
        # What triggers do is told as the same statement once more.
        if not found or sql != found[-1]:
            found.append(sql)

    world.spool._db._connection.set_trace_callback(trace)
    return found


def made(world, name: str) -> None:
    """LOOKUP, CREATE with its reply kept, FLUSH and RELEASE, as the kernel's."""
    parent, _ = world.place(world.a, "step-1/x")
    with pytest.raises(MissingError):
        world.vfs.lookup(world.a, parent, name)
    caller: Caller = msgspec.structs.replace(world.a, request=world.vfs._ctx.spool.next_handle())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with world.vfs.atomic(caller):
        _, opened = world.vfs.create(caller, parent, name, flags, 0o644)
        world.vfs.remember(caller, b"reply")
    os.pwrite(opened.fd, b"1", 0)
    world.close(world.a, opened)


def test_a_file_is_made_and_closed_in_one_transaction_of_few_statements(world, seen):
    for number in range(FILES):
        made(world, f"f{number}")
    assert seen.count("BEGIN IMMEDIATE") == seen.count("COMMIT") == FILES
    # Beside these two: the file, the close of the one before, the reply, its directory's times.
    assert len(seen) <= 6.2 * FILES


def test_a_look_up_asks_the_database_for_what_it_does_not_know_and_only_once(world, seen):
    made(world, "f")
    parent, _ = world.place(world.a, "step-1/x")
    seen.clear()
    for _ in range(FILES):
        assert world.exists(world.a, "step-1/f")
        assert not world.exists(world.a, "step-1/other")
        world.vfs.getattr(world.a, parent, None)
    assert len(seen) <= 1


def test_a_close_that_is_only_noted_asks_the_database_nothing(world, seen):
    opened = world.open_new(world.a, "step-1/f")
    os.pwrite(opened.fd, b"1", 0)
    seen.clear()
    world.close(world.a, opened)
    assert seen == []
