"""Requests about open files: one method each. See `answering`."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from typing import Final

import msgspec

from ckptgate.errors import UsageError
from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import HELD, Attr, Caller, Opened
from ckptgate_adapters.fsspec_ckpt import messages
from ckptgate_adapters.fsspec_ckpt.answering import Answer, Answering, facts_of
from ckptgate_adapters.fsspec_ckpt.messages import Told
from ckptgate_adapters.fsspec_ckpt.sessions import FILES_MAX, ClientFile
from ckptgate_adapters.fsspec_ckpt.walking import Place, Walk

__all__ = ["FileRequests"]

_OPEN_FLAGS: Final = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND
_IN_PACKET_BYTES: Final = 32 << 10


class FileRequests(Answering):
    """Open files."""

    def ping(self, request: messages.Ping) -> Iterator[Answer]:
        del request
        yield Answer(Told())

    def open_(self, request: messages.Open) -> Iterator[Answer]:
        if request.flags & ~_OPEN_FLAGS:
            msg = f"open flags {request.flags:#x} are not possible"
            raise UsageError(msg, subject=request.path)
        if len(self.session.files) >= FILES_MAX:
            raise OSError(errno.EMFILE, "too many files are open")
        if request.flags & os.O_ACCMODE == os.O_RDONLY:
            yield self._open_to_read(request)
            return
        told = self.kept(request) or self.steadily(lambda walk: self._open_anew(walk, request))
        opened = self.fs.reopen(told.fh)
        if opened is None or told.facts is None:
            msg = f"{request.path!r} was opened and is not open any more: write it again"
            raise OSError(errno.EIO, msg)
        self.session.files[told.fh] = ClientFile(
            fh=told.fh, ino=told.facts.ino, fd=opened.fd, is_writer=True, is_complete=True
        )
        self.session.unsure.pop(told.fh, None)
        self.unsure = told.fh
        self.settle(told.facts.ino)
        yield Answer(told, opened.fd)

    def _open_to_read(self, request: messages.Open) -> Answer:
        def open_(walk: Walk) -> tuple[Attr, Opened]:
            attr = walk.find(request.path).attr
            return attr, self.fs.open(self.caller, attr.ino, os.O_RDONLY)

        attr, opened = self.steadily(open_)
        file = ClientFile(
            fh=opened.fh,
            ino=attr.ino,
            fd=opened.fd,
            is_writer=False,
            is_complete=opened.is_complete,
        )
        self.session.files[opened.fh] = file
        self.journal.add(opened.fh, self.session.owner, is_writer=False)
        self.unsure = opened.fh
        return self._given(file, Told(facts=facts_of(attr), fh=opened.fh))

    def _given(self, file: ClientFile, told: Told) -> Answer:
        """A reader's file with a descriptor of its own, that can't write."""
        told = msgspec.structs.replace(told, is_complete=file.is_complete)
        if file.fd < 0:
            return Answer(told)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(f"/proc/self/fd/{file.fd}", flags)
        told = msgspec.structs.replace(told, spool_ino=os.fstat(fd).st_ino)
        return Answer(told, fd, is_own_fd=True)

    def _open_anew(self, walk: Walk, request: messages.Open) -> Told:
        """Open for writing: a new file, a new version of one, or one to be changed."""
        if request.flags & os.O_CREAT:
            parent, name = walk.parent(request.path)
            try:
                return self._make(walk, request, parent, name)
            except OSError as exc:
                if exc.errno != errno.EEXIST or request.flags & os.O_EXCL:
                    raise
        place = walk.find(request.path)
        if place.attr.kind is not NodeKind.FILE:
            raise OSError(errno.EISDIR, f"{request.path!r} is a directory")
        try:
            return self._change(request, place)
        except OSError as exc:
            if exc.errno != errno.EEXIST:
                raise
        return self._make(walk, request, place.parent, place.name, is_part=True)

    def _make(
        self, walk: Walk, request: messages.Open, parent: int, name: str, *, is_part: bool = False
    ) -> Told:
        part = f"{messages.PART_PREFIX}{secrets.token_hex(8)}" if is_part else ""

        def action(caller: Caller) -> Told:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | HELD
            mode = request.mode & 0o7777
            entry, opened = self.fs.create(caller, parent, part or name, flags, mode)
            walk.saw(entry)
            self.journal.add(opened.fh, self.session.owner, is_writer=True)
            return Told(facts=facts_of(entry.attr), fh=opened.fh, part=part, is_new=True)

        told = self.once(request, request.id, action)
        self.changed(parent, part or name)
        return told

    def _change(self, request: messages.Open, place: Place) -> Told:
        flags = os.O_RDWR | HELD | request.flags & os.O_TRUNC

        def action(caller: Caller) -> Told:
            opened = self.fs.open(caller, place.attr.ino, flags)
            self.journal.add(opened.fh, self.session.owner, is_writer=True)
            return Told(facts=facts_of(place.attr), fh=opened.fh)

        return self.once(request, request.id, action)

    def close(self, request: messages.Close) -> Iterator[Answer]:
        if request.is_again and self.journal.was_closed(request.fh, self.session.owner.session):
            # It was done; only the answer was lost. (What isn't known may have been given up.)
            yield Answer(Told())
            return
        file = self.file(request.fh)
        if not file.is_writer:
            self._released(file)
            yield Answer(Told())
            return
        try:
            if request.is_synced:
                self.fs.fsync(self.caller, file.fh, data_only=False)
            if request.part:
                self.steadily(lambda walk: self._take_place(walk, request))
            is_promise = self.fs.flush(self.caller, file.fh)
        except BaseException:
            # Whatever it is, the client is told that its close failed: it won't ask again.
            self._forget(file, is_removed=bool(request.part))
            raise
        try:
            if is_promise:
                self.settle(self._node_of(file, request.path), is_close=True)
        except BaseException:
            # The same: it is written and known, and only its promise failed.
            self._released(file)
            raise
        self._released(file, is_closed=True)
        yield Answer(Told())

    def _node_of(self, file: ClientFile, path: str) -> int:
        """The file's node, which isn't told of a handle that a predecessor opened."""
        return file.ino or self.steadily(lambda walk: walk.find(path).attr.ino)

    def _take_place(self, walk: Walk, request: messages.Close) -> None:
        """A new version gets the name that it is for; it is still open, so nothing is voted."""
        parent, name = walk.parent(request.path)

        def action(caller: Caller) -> Told:
            self.fs.rename(caller, parent, request.part, parent, name, 0)
            return Told()

        self.once(request, request.id, action)
        self.changed(parent, request.part, name)

    def give_up(self, request: messages.GiveUp) -> Iterator[Answer]:
        file = self.session.files.get(request.fh)
        if file is not None:
            self._forget(file, is_removed=request.is_removed)
        yield Answer(Told())

    def _forget(self, file: ClientFile, *, is_removed: bool) -> None:
        if file.is_writer:
            self.fs.give_up(file.fh, is_removed=is_removed)
            self.session.files.pop(file.fh, None)
            self.journal.drop(file.fh)
        else:
            self._released(file)

    def _released(self, file: ClientFile, *, is_closed: bool = False) -> None:
        self.fs.release(file.fh)
        self.session.files.pop(file.fh, None)
        self.journal.drop(file.fh, is_closed=is_closed)
        if file.is_writer and self.told is not None:
            self.told.node(file.ino)

    def reopen(self, request: messages.Reopen) -> Iterator[Answer]:
        yield self._given(self.file(request.fh), Told(fh=request.fh))

    def ensure(self, request: messages.Ensure) -> Iterator[Answer]:
        file = self.file(request.fh)
        if request.length > 0 and request.offset >= 0:
            self.fs.ensure(self.caller, file.fh, request.offset, request.length)
        yield Answer(Told(spool_ino=os.fstat(file.fd).st_ino if file.fd >= 0 else 0))

    def read(self, request: messages.Read) -> Iterator[Answer]:
        file = self.file(request.fh)
        if not 0 <= request.length <= messages.READ_BYTES_MAX or request.offset < 0:
            msg = f"{request.length} bytes at {request.offset} can't be read at once"
            raise UsageError(msg)
        data = self.fs.read(self.caller, file.fh, request.offset, request.length)
        if len(data) <= _IN_PACKET_BYTES:
            yield Answer(Told(data=data))
            return
        fd = os.memfd_create("ckpt-read", os.MFD_CLOEXEC)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        except BaseException:
            # An interrupt, too, must not keep the descriptor.
            os.close(fd)
            raise
        yield Answer(Told(has_data=True), fd, is_own_fd=True)

    def sync(self, request: messages.Sync) -> Iterator[Answer]:
        self.fs.fsync(self.caller, self.file(request.fh).fh, data_only=False)
        yield Answer(Told())
