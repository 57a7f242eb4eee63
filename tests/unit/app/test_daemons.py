"""Starting the daemon of `ckpt://`."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from ckptgate.app import daemons


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_a_daemon_is_started_keeps_nobody_from_starting_another(
    tmp_path: Path,
):
    """It may live as long as its training; the next start waits for the first one only."""
    with daemons._alone(str(tmp_path)):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with open(tmp_path / "start.lock", "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
