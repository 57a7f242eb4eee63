"""Headless Chromium from the distribution, spoken to by its debugging pipe: no driver is needed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Tab", "browser"]

WAIT_S = 120.0


class Tab:
    """One page of the browser."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Open the tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its result."""
        id_ = next(self._ids)
        message = {"id": id_, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == id_:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reader], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._reader, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def look(self, expression: str) -> Any:
        """The value of a script's expression in the page; of a promise what comes of it."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait for an expression to be true."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.look(expression)):
            assert time.monotonic() < deadline, f"not true: {expression}"
            time.sleep(0.05)
        return value

    def go(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        """Show *url* in a window of that size."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("Page.navigate", url=url)

    def complaints(self) -> list[str]:
        """What the browser said about the page: refused scripts, errors."""
        self.look("1")
        return [
            json.dumps(event["params"])
            for event in self.events
            if event["method"]
            in {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}
        ]


@contextlib.contextmanager
def browser(program: str, home: Path) -> Iterator[Tab]:
    """Chromium with one tab; it is gone afterwards, with all its processes."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    # The pipe's ends are 3 and 4 there, by the option's contract.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}']
    command += [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
        "--remote-debugging-pipe", f"--user-data-dir={home}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, pass_fds=(from_us, to_us), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    os.close(from_us)
    os.close(to_us)
    try:
        tab = Tab(from_browser, to_browser)
        tab.attach()
        yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
