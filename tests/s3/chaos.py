"""A proxy between an S3 client and its server that does on plan what networks and servers do.

A rule names a kind of request and which of them (the first, the third, all from the tenth on); its
fault does with that exchange what it says. All others pass whole: a request is read to its end
before the server is asked, and a reply before the client is told, so that "the reply was lost"
means that the server has done it. A server may be killed and restarted behind it.

The proxy runs on a thread of its own; rules may be added at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.s3.faults import LIMIT, Exchange, Fault, GoneError, Upstream, passing
from tests.s3.wire import Kind, Reply, Request, read_request

__all__ = ["ALWAYS", "ChaosProxy", "Rule", "chaos"]

ALWAYS = 1 << 30
"""For `times`."""


@dataclass
class Rule:
    """Which requests meet the fault.

    Attributes:
        kinds: of requests; None for any.
        first: the first of them that it meets, from 1.
        times: how many in a row.
        where: what else must be true of a request to count.
        met: those that it has met.
    """

    fault: Fault
    kinds: frozenset[Kind] | None = None
    first: int = 1
    times: int = 1
    where: Callable[[Request], bool] = lambda request: True
    met: list[Request] = field(default_factory=list)
    _seen: int = 0

    def takes(self, request: Request) -> bool:
        """Count *request*; whether the fault is for it."""
        if (self.kinds is not None and request.kind not in self.kinds) or not self.where(request):
            return False
        self._seen += 1
        is_hit = self.first <= self._seen < self.first + self.times
        if is_hit:
            self.met.append(request)
        return is_hit


class ChaosProxy:
    """See the module; made by `chaos`."""

    def __init__(self, target_port: int) -> None:
        self.seen: list[Request] = []
        """All requests, as they came."""
        self._upstream = Upstream(target_port)
        self._rules: list[Rule] = []
        self._counts: Counter[Kind] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=LIMIT))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rule(
        self,
        fault: Fault,
        *kinds: Kind,
        nth: int = 1,
        times: int = 1,
        where: Callable[[Request], bool] = lambda request: True,
    ) -> Rule:
        """Let the *nth* request of *kinds* (any, if none is named) meet *fault*."""
        made = Rule(fault, frozenset(kinds) or None, nth, times, where)
        self._rules.append(made)
        return made

    def clear(self) -> None:
        """No more faults; what is counted starts anew."""
        self._rules.clear()
        self._counts.clear()
        self.seen.clear()

    def count(self, kind: Kind) -> int:
        """How many requests of the kind have come."""
        return self._counts[kind]

    def land(self) -> list[Reply]:
        """Let requests arrive that were `late`; the server's replies, which nobody else hears."""
        waiting, self._upstream.late = self._upstream.late, []
        return [self._do(self._upstream.ask(*each)) for each in waiting]

    def close(self) -> None:
        """End all connections and the thread."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, action: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await action

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=60)

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Closed transports tell their sockets in the loop's next rounds.
        for _ in range(3):
            await asyncio.sleep(0)

    def _choose(self, request: Request) -> Fault:
        """The first rule's that takes it; all rules count it."""
        hit = [rule.fault for rule in self._rules if rule.takes(request)]
        return hit[0] if hit else passing

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                request = await read_request(reader)
                self._counts[request.kind] += 1
                request = replace(request, nth=self._counts[request.kind])
                self.seen.append(request)
                exchange = Exchange(self._upstream, request, reader, writer)
                await self._choose(request)(exchange)
        except (GoneError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client has left, or the server is away: the connection ends without a reply.
            return
        finally:
            self._tasks.discard(task)
            writer.close()


@contextlib.contextmanager
def chaos(target_port: int) -> Iterator[ChaosProxy]:
    """A proxy in front of the server at *target_port* of 127.0.0.1."""
    proxy = ChaosProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
