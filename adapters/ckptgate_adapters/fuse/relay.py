"""A script: takes packets from a socket and writes each to `/dev/fuse`. Started by `notify`.

Owns the rule that no process that serves requests ever writes an invalidation: the kernel may hold
the writer, deaf even to SIGKILL, until a request in that directory is answered. A killed server
whose own thread was held like that would never end, and its successor never begin. It imports
nothing of the project, so that it starts at once and stays small.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

__all__ = ["MESSAGE_BYTES_MAX", "SESSION_OVER", "main"]

MESSAGE_BYTES_MAX = 4096
SESSION_OVER = 3
"""Exit code when the kernel's session has ended."""


def main(device: int, source: int) -> int:
    """Relay until the other end is closed (0) or the session is over."""
    while message := os.read(source, MESSAGE_BYTES_MAX):
        try:
            os.write(device, message)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                return SESSION_OVER
            # Mostly ENOENT: the kernel didn't know the name any more.
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
