"""What can happen to one exchange between an S3 client and its server; see `tests.s3.chaos`."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tests.s3.wire import Reply, Request, error_xml, read_body, read_reply

__all__ = [
    "LIMIT", "Exchange", "Fault", "GoneError", "Upstream", "answer", "delay", "drop_reply",
    "drop_request", "duplicate", "duplicate_unheard", "during", "edit_reply", "edit_request",
    "error_after", "error_before", "error_in_200", "flip_reply", "flip_request", "late",
    "late_copy", "passing", "reset_request", "stall", "stall_after", "truncate_reply",
]  # fmt: skip

LIMIT = 1 << 20
RESET = struct.pack("ii", 1, 0)


@dataclass
class Upstream:
    """The server at *port* of 127.0.0.1; it may be away or restarted between any two requests."""

    port: int
    late: list[tuple[Request, bytes]] = field(default_factory=list)
    """Requests that are still on their way."""

    async def ask(self, request: Request, body: bytes) -> Reply:
        """Send a request, whole, on a new connection.

        Raises:
            OSError, asyncio.IncompleteReadError: the server isn't there, or died.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=LIMIT)
        try:
            writer.write(request.without("expect").head)
            writer.write(body)
            await writer.drain()
            return await read_reply(reader, is_head=request.method == "HEAD")
        finally:
            writer.close()

    async def send_part(self, request: Request, body: bytes) -> asyncio.StreamWriter:
        """Send a request's head and only *body* of what it announces; the open connection."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=LIMIT)
        writer.write(request.without("expect").head + body)
        await writer.drain()
        return writer


class GoneError(Exception):
    """This connection is over."""


@dataclass
class Exchange:
    """One request of one client, on its way."""

    upstream: Upstream
    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def body(self, limit: int = -1) -> bytes:
        """The request's body, or its first *limit* bytes; who waits to send it may."""
        if self.request.headers.get("expect"):
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await read_body(self.reader, self.request.headers, limit=limit)

    async def forward(self, body: bytes, request: Request | None = None) -> Reply:
        """Ask the server; see `Upstream.ask`."""
        return await self.upstream.ask(request or self.request, body)

    async def reply(self, reply: Reply, *, cut_at: int | None = None) -> None:
        """Tell the client; with *cut_at* only so many bytes of the body, then the end."""
        if cut_at is None:
            self.writer.write(reply.wire())
            await self.writer.drain()
            return
        self.writer.write(reply.head() + reply.body[:cut_at])
        await self.writer.drain()
        self.writer.close()
        raise GoneError

    def reset(self) -> None:
        """The client's connection ends with RST."""
        _reset(self.writer)
        raise GoneError


Fault: TypeAlias = Callable[[Exchange], Awaitable[None]]


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


async def passing(exchange: Exchange) -> None:
    """No fault."""
    await exchange.reply(await exchange.forward(await exchange.body()))


async def drop_request(exchange: Exchange) -> None:
    """The client has sent all of it, nothing arrives, and the connection is reset."""
    await exchange.body()
    exchange.reset()


async def drop_reply(exchange: Exchange) -> None:
    """The server does it; the client's connection is reset without a reply."""
    await exchange.forward(await exchange.body())
    exchange.reset()


async def late(exchange: Exchange) -> None:
    """The client's connection is reset; the request arrives only with `ChaosProxy.land`."""
    exchange.upstream.late.append((exchange.request, await exchange.body()))
    exchange.reset()


async def duplicate(exchange: Exchange) -> None:
    """The server gets it twice, one after the other; the client hears the second reply."""
    body = await exchange.body()
    await exchange.forward(body)
    await exchange.reply(await exchange.forward(body))


async def duplicate_unheard(exchange: Exchange) -> None:
    """The server gets it twice, one after the other; the client hears the first reply."""
    body = await exchange.body()
    reply = await exchange.forward(body)
    await exchange.forward(body)
    await exchange.reply(reply)


async def late_copy(exchange: Exchange) -> None:
    """Nothing happens now; a copy of the request arrives with `ChaosProxy.land`."""
    body = await exchange.body()
    exchange.upstream.late.append((exchange.request, body))
    await exchange.reply(await exchange.forward(body))


async def stall(exchange: Exchange) -> None:
    """Nothing arrives and nothing is answered, until the client gives up."""
    await exchange.body()
    await exchange.reader.read()
    raise GoneError


async def stall_after(exchange: Exchange) -> None:
    """The server does it; the client waits for the reply until it gives up."""
    await exchange.forward(await exchange.body())
    await exchange.reader.read()
    raise GoneError


def reset_request(at: int = -1) -> Fault:
    """Both connections are reset when *at* bytes of the body have passed (-1: half of it)."""

    async def fault(exchange: Exchange) -> None:
        length = int(exchange.request.headers.get("content-length", "0"))
        some = await exchange.body(length // 2 if at < 0 else at)
        _reset(await exchange.upstream.send_part(exchange.request, some))
        exchange.reset()

    return fault


def during(action: Callable[[], object], at: int = -1) -> Fault:
    """*action* is done when *at* bytes of the body have arrived; then both are reset."""

    async def fault(exchange: Exchange) -> None:
        length = int(exchange.request.headers.get("content-length", "0"))
        some = await exchange.body(length // 2 if at < 0 else at)
        writer = await exchange.upstream.send_part(exchange.request, some)
        await asyncio.get_running_loop().run_in_executor(None, action)
        _reset(writer)
        exchange.reset()

    return fault


def flip_request(at: int = -1, bit: int = 0) -> Fault:
    """One bit of the body's byte *at* (-1: the middle one) changes on its way to the server."""

    async def fault(exchange: Exchange) -> None:
        body = await exchange.body()
        await exchange.reply(await exchange.forward(_flipped(body, at, bit)))

    return fault


def flip_reply(at: int = -1, bit: int = 0) -> Fault:
    """One bit of the reply's body changes on its way to the client."""

    async def fault(exchange: Exchange) -> None:
        reply = await exchange.forward(await exchange.body())
        await exchange.reply(replace(reply, body=_flipped(reply.body, at, bit)))

    return fault


def truncate_reply(at: int = -1) -> Fault:
    """Of the reply's body *at* bytes come (-1: half), then the connection ends."""

    async def fault(exchange: Exchange) -> None:
        reply = await exchange.forward(await exchange.body())
        await exchange.reply(reply, cut_at=len(reply.body) // 2 if at < 0 else at)

    return fault


def delay(seconds: float) -> Fault:
    """It is forwarded after *seconds*."""

    async def fault(exchange: Exchange) -> None:
        body = await exchange.body()
        await asyncio.sleep(seconds)
        await exchange.reply(await exchange.forward(body))

    return fault


def answer(reply: Reply | Callable[[Request, bytes], Reply]) -> Fault:
    """The server isn't asked; *reply* is what the client hears."""

    async def fault(exchange: Exchange) -> None:
        body = await exchange.body()
        made = reply if isinstance(reply, Reply) else reply(exchange.request, body)
        await exchange.reply(replace(made, is_head=exchange.request.method == "HEAD"))

    return fault


def error_before(status: int, code: str, message: str = "injected") -> Fault:
    """The server isn't asked; the client hears an error."""
    return answer(Reply.made(status, error_xml(code, message)))


def error_after(status: int, code: str) -> Fault:
    """The server does it; the client hears an error."""

    async def fault(exchange: Exchange) -> None:
        await exchange.forward(await exchange.body())
        made = Reply.made(status, error_xml(code))
        await exchange.reply(replace(made, is_head=exchange.request.method == "HEAD"))

    return fault


def error_in_200(code: str = "InternalError", *, is_done: bool) -> Fault:
    """Status 200, spaces as of a long wait, then an error document; the server did it or not."""
    reply = Reply.made(200, b"   \n" + error_xml(code))

    async def fault(exchange: Exchange) -> None:
        body = await exchange.body()
        if is_done:
            await exchange.forward(body)
        await exchange.reply(reply)

    return fault


def edit_request(change: Callable[[Request], Request]) -> Fault:
    """The server gets another head (which breaks a signature that covers the change)."""

    async def fault(exchange: Exchange) -> None:
        body = await exchange.body()
        await exchange.reply(await exchange.forward(body, change(exchange.request)))

    return fault


def edit_reply(change: Callable[[Reply], Reply]) -> Fault:
    """The client gets another reply than the server gave."""

    async def fault(exchange: Exchange) -> None:
        await exchange.reply(change(await exchange.forward(await exchange.body())))

    return fault


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[len(data) // 2 if at < 0 else at] ^= 1 << bit
    return bytes(changed)
