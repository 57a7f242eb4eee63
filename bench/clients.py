"""Client processes: they do what a trainer does, and say how long it took."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import worker

__all__ = ["Worker", "together", "workers"]

_START_S = 0.01
"""Between the request and the moment at which all clients begin."""


class Worker:
    """One client process. One request at a time.

    It is of the session that this process is of, so both see the same unfinished checkpoints,
    unless *environment* has a job of its own.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", worker.__file__],
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, op: str, *, at: float = 0.0, **arguments: Any) -> None:
        """Ask for something; `end` waits for it."""
        words = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in arguments.items()
        }
        self.tell(json.dumps({"op": op, "at": at, **words}))

    def tell(self, text: str) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """The answer: `began`, `ended` (monotonic seconds), `result`.

        Raises:
            RuntimeError: it failed, with the client's traceback.
        """
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(text) if text else {"error": "the client died"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def seconds(self, op: str, **arguments: Any) -> float:
        """Do it and return how long it took."""
        return together([(self, {"op": op, **arguments})])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def together(requests: list[tuple[Worker, dict[str, Any]]]) -> float:
    """Have several clients begin at the same moment; seconds until the last one is done."""
    at = time.monotonic() + _START_S
    for client, arguments in requests:
        client.begin(at=at, **arguments)
    answers = [client.end() for client, _ in requests]
    ended: float = max(answer["ended"] for answer in answers)
    return ended - min(answer["began"] for answer in answers)


@contextlib.contextmanager
def workers(count: int = 1, environment: Mapping[str, str] | None = None) -> Iterator[list[Worker]]:
    """So many clients, until the block ends."""
    made = [Worker(environment) for _ in range(count)]
    try:
        yield made
    finally:
        for client in made:
            client.close()
