"""Entry point of a supervisor that goes on where a killed one was: started by the keeper.

`python -m ckptgate.app.resume SPOOL DEVICE LOCK KEEPER`, the last three being descriptors. It may
be of a newer release than the dead one: what it can't read it refuses, and the session ends.
"""

from __future__ import annotations

import os
import socket
import sys

from ckptgate.app.config import read_saved_config
from ckptgate.app.keeping import Held, check_readable
from ckptgate.app.logs import configure_logging
from ckptgate.app.supervisor import Supervisor

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run the supervisor; returns its exit code."""
    spool = argv[0]
    device, lock, keeper = (int(text) for text in argv[1:])
    for fd in (device, lock, keeper):
        os.set_inheritable(fd, False)
    config = read_saved_config(spool)
    configure_logging(config.log_level, process="supervisor", form=config.log.format)
    check_readable(spool)
    held = Held(device=device, lock=lock, keeper=socket.socket(fileno=keeper))
    Supervisor(config, held=held, is_background=True).run(None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
