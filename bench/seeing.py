"""What looking costs: CPU of a mount that is scraped every 15 s and whose page is open."""

from __future__ import annotations

import http.client
import resource
import socket
import subprocess
import time
from collections.abc import Iterator

from bench import machine, mounts
from bench.clients import workers
from bench.plan import Plan
from bench.report import Figure, spread

__all__ = ["run"]

CONFIG = "[room]\nfree_min_share = 0.0\n[status]\nlisten = '127.0.0.1:{port}'\n"
SCRAPE_S = 15.0
PAGE_S = 3.0
LIMIT = 0.2


class _Looks:
    """Asks as Prometheus and the page in a browser do."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tag = ""

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status in {200, 304}, (path, answer.status)
        return answer

    def page(self) -> None:
        headers = {"If-None-Match": self._tag} if self._tag else {}
        self._tag = self.get("/status.json", **headers).headers["ETag"]

    def during(self, seconds: float, *, is_looking: bool) -> None:
        """Look for so long, at even times, or sleep."""
        began = time.monotonic()
        scrape = page = 0.0
        while (at := time.monotonic() - began) < seconds:
            if is_looking and at >= scrape:
                self.get("/metrics")
                scrape += SCRAPE_S
            if is_looking and at >= page:
                self.page()
                page += PAGE_S
            due = min(scrape, page, seconds) if is_looking else seconds
            time.sleep(max(0.0, due - (time.monotonic() - began)))


def run(plan: Plan) -> Iterator[Figure]:
    """Percent of one core beside the same mount that nobody looks at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        mounts.scratch(plan.disk.path) as base,
        mounts.mounted(base, config=CONFIG.format(port=port)) as mount,
        workers() as one,
    ):
        for step in range(20):
            (mount.path / f"step-{step}").mkdir()
            files = {"count": max(1, plan.sizes.files // 50), "size": 4096}
            one[0].seconds("create", directory=mount.path / f"step-{step}", **files)
            if step < 19:
                one[0].seconds("commit", directory=mount.path / f"step-{step}")
        mounts.until("all are published", (mount.store / "step-18").exists)
        looks = _Looks(port)
        # What is loaded and read at the first look isn't what looking costs.
        looks.get("/metrics")
        looks.page()
        yield _figure(plan, mount, looks, "19 checkpoints, one open")


def _figure(plan: Plan, mount: mounts.Mount, looks: _Looks, state: str) -> Figure:
    machine.wait_idle(mount.processes)
    used: list[float] = []
    # Whole scrapes, so that none counts twice.
    seconds = max(plan.sizes.idle_s, 2 * SCRAPE_S if plan.sizes.idle_s >= 5 else 0.2)
    probe_s = _probe_s(mount)
    for _ in range(plan.sizes.pairs):
        each: list[float] = []
        for is_looking in (False, True):
            before = sum(map(machine.cpu_s, mount.processes))
            looks.during(seconds, is_looking=is_looking)
            each.append(sum(map(machine.cpu_s, mount.processes)) - before)
        # The process that a scrape asks the mount with is over before anybody reads its time.
        each[1] += probe_s * max(1.0, seconds / SCRAPE_S)
        used.append((each[1] - each[0]) / seconds * 100)
    title = f"{plan.disk.name}: a scrape each {SCRAPE_S:g} s, the page each {PAGE_S:g} s, {state}"
    return spread("seeing", title, used, "%", at_most=LIMIT)


def _probe_s(mount: mounts.Mount) -> float:
    """CPU of one `stat -f`, started as the publisher does."""
    times = 20

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    for _ in range(times):
        subprocess.run(["stat", "-f", "-c", "%T", mount.path], check=True, capture_output=True)
    return (used() - before) / times
