"""One asyncio loop on a thread of its own, asked from any other thread.

It ends with `stop`, at the latest when the interpreter does. After a fork the child has neither
the thread nor the right to touch what the loop had open: `abandon` keeps it all alive, unused, as
even closing the loop would take the parent's sockets out of the parent's epoll set.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from ckptgate.errors import TransientStoreError

__all__ = ["LoopThread"]

_T = TypeVar("_T")
_STOP_S: Final = 10.0
_abandoned: list[object] = []


class LoopThread:
    """The thread and its loop.

    What still runs when it ends is cancelled, and its callers get a TransientStoreError.

    Args:
        name: of the thread.
        cleanup: what is awaited on the loop, last, when it ends.
    """

    def __init__(self, name: str, cleanup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop,), name=name, daemon=True)
        thread.start()
        self._loop = loop
        self._thread = thread
        self._gate = _Gate()
        self._finish = weakref.finalize(self, _end, loop, thread, self._gate, cleanup)

    def run(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """The result of *coro*; blocks. Never from the loop's own thread."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise AssertionError("the loop's thread can't wait for itself")
        with self._gate.lock:
            if self._gate.is_closed:
                coro.close()
                raise TransientStoreError("the store is closed")
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise TransientStoreError("the store was closed meanwhile") from None
        except BaseException:
            # The caller was interrupted: nobody waits for the work any more.
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what runs, clean up, end the thread."""
        self._finish()

    def abandon(self, *used: object) -> None:
        """In a forked child: never touch it again, nor what was *used* on it.

        To collect a connection would close it, and so take it from the parent's epoll set.
        """
        self._finish.detach()
        _abandoned.append((self, used))


class _Gate:
    """Nothing is begun on a loop that ends: it would never be done."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_closed = False


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    gate: _Gate,
    cleanup: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    with gate.lock:
        gate.is_closed = True

    async def finish() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await cleanup()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    with contextlib.suppress(TimeoutError, RuntimeError):
        asyncio.run_coroutine_threadsafe(finish(), loop).result(_STOP_S)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)
    thread.join(_STOP_S)
