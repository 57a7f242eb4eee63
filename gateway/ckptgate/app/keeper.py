"""A script: holds a mount's descriptors while its supervisor is dead, and starts the next one.

Started by the supervisor of a mount without a service manager, with a socket to it. Owns the rule
that a kernel session outlives the kill of any of the mount's processes: this one has a copy of the
device and of the spool's lock, and does nothing else that could end it. It imports nothing of the
project, so that it stays small and an upgrade doesn't matter to it.

The supervisor sends `{"command": [...], "abort": PATH}`, the first time with the two descriptors,
and `{"end": true}` when there is nothing to keep any more. If the socket ends without that the
command is started, with the numbers of device, lock and a new socket added. A command that dies
again and again is given up: the session is ended, so that nobody waits for ever.

The socket is also what tells who may act: a supervisor that hands the mount over gives its end of
it along, so it ends only when both are dead.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

__all__ = ["DEATHS_MAX", "main"]

DEATHS_MAX = 5
_WINDOW_S = 60.0
_MESSAGE_BYTES_MAX = 1 << 16


class _Keeper:
    def __init__(self) -> None:
        self.fds: tuple[int, ...] = ()
        self.command: list[str] = []
        self.abort = ""
        self.deaths: list[float] = []

    def follow(self, supervisor: socket.socket) -> bool:
        """Listen until its end; whether the mount is over."""
        while True:
            data, fds = b"", list[int]()
            with contextlib.suppress(ConnectionError):
                data, fds, _, _ = socket.recv_fds(supervisor, _MESSAGE_BYTES_MAX, 2)
            if not data:
                return not self.command
            if self.takes(data, tuple(fds)):
                return True

    def takes(self, data: bytes, fds: tuple[int, ...]) -> bool:
        """Do what a message says; whether the mount is over.

        What makes no sense changes nothing.
        """
        try:
            message = json.loads(data)
            if message.get("end"):
                return True
            command, abort = [str(word) for word in message["command"]], str(message["abort"])
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
            # Of another release, after an upgrade in place: better what there is than nothing.
            say(f"a message makes no sense: {exc!r}")
            return False
        if command:
            self.command, self.abort = command, abort
            self.fds = fds or self.fds
        return False

    def is_worn_out(self) -> bool:
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < _WINDOW_S] + [now]
        return len(self.deaths) > DEATHS_MAX

    def start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Start the next supervisor."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = (*self.fds, theirs.fileno())
            words = [*self.command, *map(str, fds)]
            process = subprocess.Popen(words, pass_fds=fds, stdin=subprocess.DEVNULL)
        return ours, process

    def give_up(self) -> None:
        say("the supervisor dies again and again: the session ends")
        with contextlib.suppress(OSError), open(self.abort, "w", encoding="ascii") as stream:
            stream.write("1")


def say(what: str) -> None:
    """Into the mount's log."""
    sys.stderr.write(f"keeper: {what}\n")
    sys.stderr.flush()


def main(source: int) -> int:
    """Keep until the mount is over."""
    keeper = _Keeper()
    process: subprocess.Popen[bytes] | None = None
    supervisor = socket.socket(fileno=source)
    while True:
        with supervisor:
            is_over = keeper.follow(supervisor)
        if process is not None:
            process.wait()
        if is_over:
            return 0
        if keeper.is_worn_out():
            keeper.give_up()
            return 1
        try:
            supervisor, process = keeper.start()
        except OSError as exc:
            say(f"cannot start {keeper.command[0]}: {exc}")
            time.sleep(1)
            supervisor, process = socket.socketpair()[0], None


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(main(int(sys.argv[1])))
