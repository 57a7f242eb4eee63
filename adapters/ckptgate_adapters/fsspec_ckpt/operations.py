"""Which request is answered by what. Each connection has an object of its own, and one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from ckptgate.errors import UsageError
from ckptgate_adapters.fsspec_ckpt import messages
from ckptgate_adapters.fsspec_ckpt.answering import Answer
from ckptgate_adapters.fsspec_ckpt.file_requests import FileRequests
from ckptgate_adapters.fsspec_ckpt.name_requests import NameRequests

__all__ = ["Operations"]


class Operations(NameRequests, FileRequests):
    """The requests of one connection."""

    def answers(self, request: messages.Request) -> Iterator[Answer]:
        """The packets of the reply.

        Raises:
            OSError: it was not done.
        """
        answer = self._table.get(type(request))
        if answer is None:
            msg = "a connection says hello once"
            raise UsageError(msg)
        return answer(self, request)

    _table: ClassVar[dict[type, Callable[..., Iterator[Answer]]]] = {
        messages.Ping: FileRequests.ping,
        messages.Stat: NameRequests.stat,
        messages.List: NameRequests.list,
        messages.Open: FileRequests.open_,
        messages.Close: FileRequests.close,
        messages.GiveUp: FileRequests.give_up,
        messages.Reopen: FileRequests.reopen,
        messages.Ensure: FileRequests.ensure,
        messages.Read: FileRequests.read,
        messages.Sync: FileRequests.sync,
        messages.Mkdir: NameRequests.mkdir,
        messages.Remove: NameRequests.remove,
        messages.Rename: NameRequests.rename,
        messages.SetAttrs: NameRequests.set_attrs,
        messages.Hold: NameRequests.hold,
        messages.Unhold: NameRequests.unhold,
        messages.GetXattr: NameRequests.get_xattr,
        messages.SetXattr: NameRequests.set_xattr,
        messages.Wait: NameRequests.wait,
        messages.WaitStored: NameRequests.wait_stored,
    }
