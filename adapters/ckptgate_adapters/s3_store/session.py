"""The connection to the service: s3fs's session and configuration, its own calls, our errors.

`S3FileSystem` finds credentials, region and endpoint and makes the client (`clients`); every
request is then made on the client itself, as s3fs's own calls retry conditional writes and drop
what they don't know of a request. All of it lives on one loop, on a thread of its own, made at the
first call and made anew in a forked child. `run` may be called from any other thread; the
coroutines of this class run on the loop only.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from ckptgate.errors import IntegrityError, TransientStoreError
from ckptgate.model.ids import check_relative_path
from ckptgate_adapters.s3_store.bodies import Moving
from ckptgate_adapters.s3_store.buffers import Buffers
from ckptgate_adapters.s3_store.checksums import crc64, decode
from ckptgate_adapters.s3_store.clients import Clients
from ckptgate_adapters.s3_store.failures import BadCredentialsError, translated
from ckptgate_adapters.s3_store.location import S3Location, S3Options
from ckptgate_adapters.s3_store.loop import LoopThread
from ckptgate_adapters.s3_store.retry import RetryPolicy

__all__ = ["Answer", "Body", "Session"]

Answer: TypeAlias = Mapping[str, Any]
"""What the service answers, as the client gives it."""

_T = TypeVar("_T")
_DEADLINE_S: Final = 900.0
"""The longest that a request without a body is waited for: Complete and copies take minutes."""
_NEXT: Final[Mapping[str, Mapping[str, str]]] = {
    "list_objects_v2": {"NextContinuationToken": "ContinuationToken"},
    "list_multipart_uploads": {
        "NextKeyMarker": "KeyMarker",
        "NextUploadIdMarker": "UploadIdMarker",
    },
    "list_parts": {"NextPartNumberMarker": "PartNumberMarker"},
}
"""How each listing goes on: what its answer says, and how the next request says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A whole answer to a GET.

    Attributes:
        answer: the headers.
        data: the bytes.
    """

    answer: Answer
    data: bytes


@dataclass(slots=True)
class _Connected:
    """What belongs to one loop."""

    thread: LoopThread
    gate: asyncio.Semaphore
    buffers: Buffers
    files: asyncio.Semaphore
    clients: Clients
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)


class Session:
    """The connection of one store object.

    Args:
        location: where the store is.
        options: how it is spoken to.
        policy: of retries; None makes it from the options.
    """

    def __init__(
        self, location: S3Location, options: S3Options, *, policy: RetryPolicy | None = None
    ) -> None:
        self.location = location
        self.options = options
        self.policy = policy or RetryPolicy(
            tries_max=options.tries_max, first_s=options.retry_first_s, max_s=options.retry_max_s
        )
        self._lock = threading.Lock()
        self._connected: _Connected | None = None
        self._is_closed = False
        _sessions.add(self)

    def __repr__(self) -> str:
        return f"<Session {self.location.url}>"

    def run(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """Do *coro* on the loop and wait for it; any thread but the loop's."""
        try:
            connected = self._here()
        except BaseException:
            # An interrupt, too: a coroutine that nobody awaits warns when it is collected.
            coro.close()
            raise
        return connected.thread.run(coro)

    def close(self) -> None:
        """Cancel what runs and close all connections; nothing can be called afterwards."""
        with self._lock:
            self._is_closed = True
        # What is cancelled still has its connection, to abort what it began.
        if self._connected is not None:
            self._connected.thread.stop()
            self._connected = None

    def key(self, path: str) -> str:
        """The object's key for *path* below the store's root, which is none itself."""
        return self.location.key(check_relative_path(path))

    # On the loop

    @property
    def buffers(self) -> Buffers:
        """The memory for parts, of all that is sent and read."""
        return self._here().buffers

    @property
    def files(self) -> asyncio.Semaphore:
        """Held for each file that is sent, so that the open ones are bounded, too."""
        return self._here().files

    @property
    def clients(self) -> Clients:
        """Who makes the requests."""
        return self._here().clients

    @property
    def trial(self) -> asyncio.Lock:
        """Held by who finds out what the store can do."""
        return self._here().trial

    async def call(self, operation: str, **params: Any) -> Answer:
        """Make one request, once.

        Args:
            operation: the client's method.
            params: its arguments; `Bucket` is added.

        Raises:
            CkptError: the contract's, or one of those of `failures`.
        """
        async with self._asking(operation, self._subject(params)) as client:
            return await _ask(client, operation, self._with_bucket(params), self._patience)

    async def retried(self, operation: str, **params: Any) -> Answer:
        """`call`, again after errors that may pass: for what may be done twice."""
        return await self.policy.run(partial(self.call, operation, **params), operation)

    async def body(self, *, limit: int, **params: Any) -> Body:
        """`get_object` with all its bytes, once.

        Raises:
            IntegrityError: more than *limit* bytes.
            TransientStoreError: they changed on the way, or the answer broke off.
        """
        pieces = io.BytesIO()
        answer = await self.stream(pieces.write, limit=limit, ChecksumMode="ENABLED", **params)
        data = pieces.getvalue()
        wanted = decode(answer.get("ChecksumCRC64NVME") or "")
        if wanted is not None and "Range" not in params and wanted != crc64(data):
            subject = self._subject(params)
            msg = f"{subject!r} changed on its way from the store: its checksum is another"
            raise TransientStoreError(msg, subject=subject)
        return Body(answer=answer, data=data)

    async def stream(
        self,
        take: Callable[[bytes], object],
        *,
        limit: int,
        check: Callable[[Answer], None] | None = None,
        **params: Any,
    ) -> Answer:
        """`get_object`, once, its bytes given to *take* as they come, if *check* lets them.

        Raises:
            IntegrityError: more than *limit* bytes, of which *take* got none too many.
            TransientStoreError: the answer broke off; *take* may have had a part.
        """
        subject = self._subject(params)
        async with self._asking("get_object", subject) as client:
            params = self._with_bucket(params)
            answer = await _ask(client, "get_object", params, self._patience)
            body = answer["Body"]
            try:
                if check is not None:
                    check(answer)
                done = 0
                async for piece in body.raw_stream.content.iter_any():
                    done += len(piece)
                    if done > limit:
                        msg = f"{subject!r} is larger than {limit} bytes"
                        raise IntegrityError(msg, subject=subject)
                    take(piece)
            finally:
                body.close()
        wanted = answer.get("ContentLength")
        if wanted is not None and done != wanted:
            msg = f"{subject!r} broke off after {done} of {wanted} bytes"
            raise TransientStoreError(msg, subject=subject)
        return answer

    async def signed_url(self, key: str, seconds: int) -> str:
        """Where *key* can be got without the client for that long; it is as good as a key to it."""
        async with self._asking("get_object", self._subject({"Key": key})) as client:
            params = self._with_bucket({"Key": key})
            url: str = await client.generate_presigned_url(
                "get_object", Params=params, ExpiresIn=seconds
            )
            return url

    async def pages(self, operation: str, **params: Any) -> AsyncIterator[Answer]:
        """All pages of a listing, each asked for again after errors that may pass."""
        following = _NEXT[operation]
        while True:
            page = await self.retried(operation, **params)
            yield page
            if not page.get("IsTruncated"):
                return
            marks = {mark: page.get(name) for name, mark in following.items()}
            if not any(marks.values()) or marks.items() <= params.items():
                subject = self._subject(params)
                msg = f"the listing of {subject!r} doesn't say how it goes on"
                raise TransientStoreError(msg, subject=subject)
            params.update({mark: value for mark, value in marks.items() if value})

    @property
    def _patience(self) -> float:
        return self.options.stall_s

    def _subject(self, params: Mapping[str, Any]) -> str:
        key = params.get("Key") or params.get("Prefix")
        return self.location.path(key) or self.location.url if key else self.location.url

    def _with_bucket(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"Bucket": self.location.bucket, **params}

    def _here(self) -> _Connected:
        connected = self._connected
        if connected is not None:
            return connected
        with self._lock:
            if self._is_closed:
                raise TransientStoreError("the store is closed", subject=self.location.url)
            if self._connected is None:
                holder: list[_Connected] = []
                thread = LoopThread("s3-store", partial(_disconnect, holder))
                options = self.options
                self._connected = _Connected(
                    thread,
                    asyncio.Semaphore(options.max_parallel),
                    Buffers(options.parts_in_flight, options.part_bytes),
                    asyncio.Semaphore(options.max_parallel),
                    Clients(options),
                )
                holder.append(self._connected)
            return self._connected

    @asynccontextmanager
    async def _asking(self, operation: str, subject: str) -> AsyncGenerator[Any]:
        """The client for one request, with our errors; the place of one in flight is held."""
        connected = self._here()
        bucket = self.location.bucket
        with translated(operation, subject, bucket):
            client = await connected.clients.take()
        try:
            with translated(operation, subject, bucket):
                async with connected.gate:
                    yield client.api
        except BadCredentialsError:
            connected.clients.refuse(client)
            raise
        finally:
            await connected.clients.give_back(client)

    def forked(self) -> None:
        """For the child of a fork, which has but the thread that forked: begin anew."""
        self._lock = threading.Lock()
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.thread.abandon(connected)


async def _ask(client: Any, operation: str, params: dict[str, Any], stall_s: float) -> Answer:
    """One request; one with a body must move, or be answered, at least every *stall_s*."""
    method: Callable[..., Coroutine[Any, Any, Answer]] = getattr(client, operation)
    body = params.get("Body")
    if not isinstance(body, Moving):
        async with asyncio.timeout(_DEADLINE_S):
            return await method(**params)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(stall_s) as patience:
        body.on_move = lambda: patience.reschedule(loop.time() + stall_s)
        try:
            return await method(**params)
        finally:
            body.on_move = None


async def _disconnect(holder: list[_Connected]) -> None:
    """Close all connections."""
    for connected in holder:
        await connected.clients.close()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
