"""Requests about names and attributes: one method each. See `answering`."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from ckptgate.errors import PendingError
from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Attr, Caller, SetAttr
from ckptgate_adapters.fsspec_ckpt import messages
from ckptgate_adapters.fsspec_ckpt.answering import Answer, Answering, facts_of
from ckptgate_adapters.fsspec_ckpt.messages import Told
from ckptgate_adapters.fsspec_ckpt.walking import Place, Walk

__all__ = ["NameRequests"]

_PAGE_BYTES: Final = 32 << 10
"""Of names in a packet; attributes come on top."""
_STATE: Final = "user.ckptgate.state"
_STORED: Final = "user.ckptgate.stored"
_POLL_S: Final = 0.05
_HELD_MAX: Final = 4096


class NameRequests(Answering):
    """Names and attributes."""

    def stat(self, request: messages.Stat) -> Iterator[Answer]:
        def stat(walk: Walk) -> Told:
            place = walk.find(request.path, is_followed=request.is_followed)
            target = place.link
            if place.attr.kind is NodeKind.SYMLINK:
                target = self.fs.readlink(self.caller, place.attr.ino)
            return Told(facts=facts_of(place.attr), target=target)

        yield Answer(self.steadily(stat))

    def list(self, request: messages.List) -> Iterator[Answer]:
        def listed(walk: Walk) -> tuple[Place, list[messages.Name]]:
            place = walk.find(request.path)
            if place.attr.kind is not NodeKind.DIR:
                return place, []
            return place, list(self._names(request.path, place, walk))

        place, names = self.steadily(listed)
        facts = facts_of(place.attr)
        page: list[messages.Name] = []
        size = 0
        for name in names:
            page.append(name)
            size += 96 + 4 * (len(name.name) + len(name.target))
            if size > _PAGE_BYTES:
                yield Answer(Told(facts=facts, names=tuple(page), has_more=True))
                page, size = [], 0
        yield Answer(Told(facts=facts, names=tuple(page)))

    def _names(self, path: str, place: Place, walk: Walk) -> Iterator[messages.Name]:
        fs, caller = self.fs, self.caller
        fh = fs.opendir(caller, place.number)
        try:
            for item in fs.readdir(caller, fh, 0):
                if item.name in {".", ".."} or item.name.startswith(messages.PART_PREFIX):
                    continue
                attr = None if item.entry is None else item.entry.attr
                with contextlib.suppress(FileNotFoundError):
                    try:
                        if attr is None:
                            attr = walk.saw(fs.lookup(caller, place.number, item.name)).attr
                        yield self._name(path, item.name, attr, walk)
                    except OSError as exc:
                        # It went meanwhile.
                        if exc.errno not in {errno.ENOENT, errno.ESTALE}:
                            raise
        finally:
            fs.releasedir(fh)

    def _name(self, path: str, name: str, attr: Attr, walk: Walk) -> messages.Name:
        if attr.kind is not NodeKind.SYMLINK:
            return messages.Name(name, facts_of(attr))
        target = self.fs.readlink(self.caller, attr.ino)
        with contextlib.suppress(OSError):
            attr = walk.find(f"{path}/{name}" if path else name).attr
        return messages.Name(name, facts_of(attr), target)

    def mkdir(self, request: messages.Mkdir) -> Iterator[Answer]:
        def make(walk: Walk) -> Told:
            parent, name = walk.parent(request.path)

            def action(caller: Caller) -> Told:
                entry = walk.saw(self.fs.mkdir(caller, parent, name, request.mode & 0o7777))
                return Told(facts=facts_of(entry.attr))

            told = self.once(request, request.id, action)
            self.changed(parent, name)
            return told

        told = self.steadily(make)
        if told.facts is not None:
            self.settle(told.facts.ino)
        yield Answer(told)

    def remove(self, request: messages.Remove) -> Iterator[Answer]:
        def remove(walk: Walk) -> int:
            parent, name = walk.parent(request.path)

            def action(caller: Caller) -> Told:
                if request.is_dir:
                    self.fs.rmdir(caller, parent, name)
                else:
                    self.fs.unlink(caller, parent, name)
                return Told()

            self.once(request, request.id, action)
            self.changed(parent, name)
            return parent

        parent = self.steadily(remove)
        if request.is_dir:
            self.settle(parent)
        yield Answer(Told())

    def rename(self, request: messages.Rename) -> Iterator[Answer]:
        def rename(walk: Walk) -> tuple[int, ...]:
            parent, name = walk.parent(request.path)
            new_parent, new_name = walk.parent(request.to)

            def action(caller: Caller) -> Told:
                self.fs.rename(caller, parent, name, new_parent, new_name, request.flags)
                return Told()

            self.once(request, request.id, action)
            self.changed(parent, name)
            self.changed(new_parent, new_name)
            return tuple(dict.fromkeys((parent, new_parent)))

        self.settle(*self.steadily(rename))
        yield Answer(Told())

    def set_attrs(self, request: messages.SetAttrs) -> Iterator[Answer]:
        changes = SetAttr(mode=request.mode, mtime_ns=request.mtime_ns, size=request.size)

        def change(walk: Walk) -> Told:
            ino = walk.find(request.path).attr.ino

            def action(caller: Caller) -> Told:
                return Told(facts=facts_of(self.fs.setattr(caller, ino, changes, None)))

            told = self.once(request, request.id, action)
            if self.told is not None:
                self.told.node(ino)
            return told

        yield Answer(self.steadily(change))

    def hold(self, request: messages.Hold) -> Iterator[Answer]:
        if len(self.session.held) >= _HELD_MAX:
            raise OSError(errno.EMFILE, "too many directories are held")

        def hold(walk: Walk) -> Told:
            place = walk.find(request.path)
            walk.keep(place)
            self.session.held.append(place.number)
            return Told(fh=place.number, facts=facts_of(place.attr))

        yield Answer(self.steadily(hold))

    def unhold(self, request: messages.Unhold) -> Iterator[Answer]:
        if request.held in self.session.held:
            self.session.held.remove(request.held)
            self.fs.forget([(request.held, 1)])
        yield Answer(Told())

    def _node(self, walk: Walk, request: messages.GetXattr | messages.SetXattr) -> int:
        """What an attribute is of."""
        if not request.held:
            return walk.find(request.path).attr.ino
        if request.held not in self.session.held:
            raise OSError(errno.EBADF, "this directory is not held any more")
        return request.held

    def get_xattr(self, request: messages.GetXattr) -> Iterator[Answer]:
        def get(walk: Walk) -> bytes:
            return self.fs.getxattr(self.caller, self._node(walk, request), request.name)

        yield Answer(Told(data=self.steadily(get)))

    def set_xattr(self, request: messages.SetXattr) -> Iterator[Answer]:
        def put(walk: Walk) -> Told:
            ino = self._node(walk, request)

            def action(caller: Caller) -> Told:
                self.fs.setxattr(caller, ino, request.name, request.value, 0)
                return Told()

            return self.once(request, request.id, action)

        yield Answer(self.steadily(put))

    def wait(self, request: messages.Wait) -> Iterator[Answer]:
        until = None if request.timeout_s is None else time.monotonic() + request.timeout_s

        def wait(walk: Walk) -> bytes:
            # The name of an aborted checkpoint is gone; its node, as long as it is known, is not.
            ino = walk.find(request.path).attr.ino
            while True:
                state = self.fs.getxattr(self.caller, ino, _STATE)
                is_late = until is not None and time.monotonic() >= until
                if is_late or _is_decided(state) or self.is_gone():
                    return state
                time.sleep(_POLL_S)

        yield Answer(Told(data=self.steadily(wait)))

    def wait_stored(self, request: messages.WaitStored) -> Iterator[Answer]:
        until = time.monotonic() + request.timeout_s

        def wait(walk: Walk) -> None:
            ino = walk.find(request.path).attr.ino
            while self.fs.getxattr(self.caller, ino, _STORED) != b"yes":
                if time.monotonic() >= until or self.is_gone():
                    msg = f"{request.path!r} is staged, but not in the store yet"
                    raise PendingError(msg, subject=request.path, hint="ckptgate status")
                time.sleep(_POLL_S)

        self.steadily(wait)
        yield Answer(Told())


def _is_decided(state: bytes) -> bool:
    value = msgspec.json.decode(state, type=dict[str, object]).get("state")
    return value in {"committed", "replaced", "aborted", "abandoned"}
