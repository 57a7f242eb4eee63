"""While the gateway is being stopped or drained: what may still be done in the mount."""

from __future__ import annotations

import errno

import msgspec
import pytest

from ckptgate.errors import RefusedError
from ckptgate.ports.rows import STOP_META, StopNotice


def hold(world, **fields) -> None:
    notice = StopNotice(refuses=True, **fields)
    world.spool.set_meta(STOP_META, msgspec.json.encode(notice).decode())


def refused(call, *words) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call(*words)
    assert caught.value.errno == errno.EROFS
    assert "allow" in caught.value.hint
    return caught.value


def test_no_checkpoint_is_begun_and_what_is_begun_is_finished(world, caplog):
    world.mkdir(world.a, "step-1")
    opened = world.open_new(world.a, "step-1/w.bin")
    hold(world, why="stop")
    assert "is being stopped" in str(refused(world.mkdir, world.a, "step-2"))
    refused(world.mkdir, world.a, "step-3.tmp")
    assert "checkpoint-refused path='step-2'" in caplog.text
    world.close(world.a, opened)
    world.mkdir(world.a, "step-1/sub")
    world.write(world.a, "step-1/sub/late.bin", b"late")
    world.write(world.a, "log.txt", b"plain files go on")
    world.mkdir(world.a, "plain")
    world.commit_own("", "step-1")
    world.symlink(world.a, "step-1", "latest")
    world.spool.drop_meta(STOP_META)
    world.mkdir(world.a, "step-2")


def test_a_temporary_directory_that_was_begun_gets_its_final_name(world):
    world.mkdir(world.a, "step-1.tmp")
    world.write(world.a, "step-1.tmp/w.bin", b"1")
    hold(world, why="drain")
    world.rename(world.a, "step-1.tmp", "step-1")
    assert world.names(world.a) == ["step-1"]


def test_a_whole_file_gets_no_new_version(world):
    hold(world, why="stop")
    refused(world.write, world.a, "model.pt", b"1")
    world.spool.drop_meta(STOP_META)
    world.write(world.a, "model.pt", b"1")
    world.publish_whole("model.pt")
    hold(world, why="stop")
    refused(world.write, world.a, "model.pt", b"2")
    assert world.read(world.a, "model.pt") == b"1"
    # Finishing is no beginning: what was written beside it gets its name.
    world.write(world.a, "model.tmp", b"2")
    world.rename(world.a, "model.tmp", "model.pt")


def test_an_old_checkpoint_can_be_removed_for_the_last_save(world):
    world.mkdir(world.a, "step-1")
    world.write(world.a, "step-1/w.bin", b"1")
    world.commit_own("", "step-1")
    hold(world, why="stop")
    world.unlink(world.a, "step-1/w.bin")
    world.rmdir(world.a, "step-1")
    assert world.names(world.a) == []


def test_a_drain_whose_command_was_killed_ends_by_itself(world):
    hold(world, why="drain", until_ns=world.clock.now_ns() + 10**10)
    assert "is being drained" in str(refused(world.mkdir, world.a, "step-1"))
    world.clock.sleep(11)
    world.mkdir(world.a, "step-1")


def test_a_setting_of_another_release_refuses_nothing(world):
    world.spool.set_meta(STOP_META, "{torn")
    world.mkdir(world.a, "step-1")
