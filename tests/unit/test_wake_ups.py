"""Wake-ups between the processes of a daemon."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckptgate_adapters.channels import PUBLISHER_SOCKET, DatagramReceiver, DatagramWaker
from ckptgate_adapters.mapped_number import MappedNumber


def test_a_wake_up_that_is_lost_costs_one_idle_interval_and_no_later_wake_up(tmp_path: Path):
    receiver = DatagramReceiver(str(tmp_path), PUBLISHER_SOCKET)
    waker = DatagramWaker(str(tmp_path))
    mark = MappedNumber(str(tmp_path / f"{PUBLISHER_SOCKET}.armed"))
    with (
        contextlib.closing(receiver),
        contextlib.closing(mark),
        contextlib.closing(waker._sender._sock),
    ):
        waker.wake()
        assert receiver.wait(5.0) == b"w"
        receiver.drain()
        # Another sender was killed between the mark and the message.
        mark.set(0)
        waker.wake()
        assert receiver.wait(0.05) is None
        waker.wake()
        assert receiver.wait(5.0) == b"w"
