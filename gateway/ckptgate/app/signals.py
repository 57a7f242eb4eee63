"""SIGTERM and SIGINT for a loop that waits on descriptors. Main thread only."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator

__all__ = ["stop_signals"]


def _ignore(number: int, frame: object) -> None:
    """A signal handler: the wake-up descriptor tells the loop."""
    del number, frame


@contextlib.contextmanager
def stop_signals() -> Generator[int]:
    """Each of them makes the yielded descriptor readable, and does nothing else."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)
