"""Operations of the session itself, and those that are refused for good. One function an opcode."""

from __future__ import annotations

import errno

from ckptgate_adapters.fuse.request import EMPTY, Context, Reply, Request

__all__ = ["destroy", "init", "ioctl"]


def init(context: Context, request: Request) -> Reply:
    """INIT: agree on capabilities."""
    raw = context.session.accept(request.body, passthrough=context.passthrough)
    context.on_init()
    return Reply((raw,))


def destroy(_context: Context, _request: Request) -> Reply:
    """DESTROY: the session ends after this reply."""
    return EMPTY


def ioctl(_context: Context, _request: Request) -> Reply:
    """IOCTL: none is known here."""
    msg = "no ioctl is known here"
    raise OSError(errno.ENOTTY, msg)
