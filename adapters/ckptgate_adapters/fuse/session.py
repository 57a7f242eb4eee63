"""The kernel session: device descriptor and what INIT agreed, in a form that a successor can use.

Owns the rule that a session outlives the process that serves it: before the INIT reply is sent the
agreement lies in the state file (where there is one), so that whoever holds the descriptor can
start another server at any moment. One server at a time; `accept` is called by one protocol thread.

A server of another release reads that file, too: its version is told apart first, and what isn't
this release's is refused before anything of the session is touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import Final

import msgspec

from ckptgate.errors import FormatVersionError, UnusableError
from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.channel import MountOptions, mount
from ckptgate_adapters.fuse.wire import InitFlag

__all__ = ["STATE_VERSION", "FuseSession", "Negotiated"]

MAX_IO_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
_BACKGROUND_MAX: Final = 64
_CONGESTION: Final = 48
_TAG_BITS: Final = 15
_UNIQUE_BITS: Final = 48
STATE_VERSION: Final = 1
"""Of the state file and of the list of open files beside it."""

_WANTED: Final = (
    InitFlag.ASYNC_READ
    | InitFlag.ATOMIC_O_TRUNC
    | InitFlag.BIG_WRITES
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.MAX_PAGES
    | InitFlag.INIT_EXT
    | InitFlag.HANDLE_KILLPRIV_V2
    | InitFlag.DIRECT_IO_ALLOW_MMAP
    | InitFlag.HAS_RESEND
)
"""No locks (they stay in the kernel), no write-back cache (it hides ENOSPC and forbids
passthrough), no POSIX ACLs (permissions are the mode's)."""


class Negotiated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What INIT agreed.

    Attributes:
        minor: the kernel's protocol minor version.
        flags: agreed capabilities, all 64 bits.
        max_stack_depth: how deep a backing file system may be stacked (1, or 2 for overlayfs).
    """

    minor: int
    flags: int
    max_stack_depth: int

    @property
    def has_passthrough(self) -> bool:
        """Whether the kernel may read and write backing files itself."""
        return bool(self.flags & InitFlag.PASSTHROUGH)

    @property
    def has_resend(self) -> bool:
        """Whether the kernel sends requests again that a dead server had read."""
        return bool(self.flags & InitFlag.HAS_RESEND)


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    """What every release's state says."""

    version: int


class _State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The session as a successor gets it."""

    version: int
    is_settled: bool
    tag: int
    max_stack_depth: int
    state_path: str
    negotiated: Negotiated | None


class FuseSession:
    """A mounted kernel session.

    Attributes:
        fd: the device descriptor; the session doesn't close it.
        state_path: file that holds `state()`; `<state_path>.opens` lists the open files. None: the
            session ends with its process.
        tag: a number that tells this session's request ids from another's.
        is_resumed: another process served it before; requests may come again.
        is_settled: no request was read that isn't answered (said by a server that ends in order).
        negotiated: None until INIT.
    """

    def __init__(self, fd: int, *, state_path: str | None = None, max_stack_depth: int = 1) -> None:
        """A session that nobody has served yet; older state under *state_path* is removed."""
        self.fd = fd
        self.state_path = state_path
        self.tag = secrets.randbits(_TAG_BITS)
        self.max_stack_depth = max_stack_depth
        self.is_resumed = False
        self.is_settled = True
        self.negotiated: Negotiated | None = None
        if state_path is not None:
            for path in (state_path, f"{state_path}.opens"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            self._save()

    @classmethod
    def mount(
        cls,
        mountpoint: str,
        options: MountOptions | None = None,
        *,
        state_path: str | None = None,
        max_stack_depth: int = 1,
    ) -> FuseSession:
        """Mount and start a session; errors as `channel.mount`."""
        fd = mount(mountpoint, options)
        return cls(fd, state_path=state_path, max_stack_depth=max_stack_depth)

    @classmethod
    def from_state(cls, fd: int, state: bytes) -> FuseSession:
        """Go on with a session that another process served.

        Args:
            fd: the session's device descriptor.
            state: what `state()` gave there last (or the content of its state file).

        Raises:
            FormatVersionError: another release wrote it, which this one can't go on from.
            UnusableError: *state* is not a session's state.
        """
        try:
            version = msgspec.json.decode(state, type=_Version).version
            if version != STATE_VERSION:
                msg = f"the fuse session's state has version {version}, not {STATE_VERSION}"
                raise FormatVersionError(msg, hint="unmount, and mount with this release")
            known = msgspec.json.decode(state, type=_State)
        except msgspec.MsgspecError as exc:
            msg = f"state of a fuse session is not valid: {exc}"
            raise UnusableError(msg, hint="unmount and mount again") from exc
        session = cls(fd, max_stack_depth=known.max_stack_depth)
        session.state_path = known.state_path or None
        session.tag = known.tag
        session.negotiated = known.negotiated
        session.is_resumed = True
        session.is_settled = known.is_settled
        return session

    @classmethod
    def resume(cls, fd: int, state_path: str) -> FuseSession:
        """`from_state` with the content of the state file.

        Raises:
            UnusableError: there is no valid state.
        """
        try:
            with open(state_path, "rb") as file:
                state = file.read()
        except OSError as exc:
            msg = f"no state of a fuse session at {state_path!r}: {exc.strerror}"
            raise UnusableError(msg, subject=state_path, hint="unmount and mount again") from exc
        return cls.from_state(fd, state)

    def state(self) -> bytes:
        """The session for `from_state`."""
        return msgspec.json.encode(
            _State(
                version=STATE_VERSION,
                is_settled=self.is_settled,
                tag=self.tag,
                max_stack_depth=self.max_stack_depth,
                state_path=self.state_path or "",
                negotiated=self.negotiated,
            )
        )

    def settle(self, *, is_settled: bool) -> None:
        """Note whether every request that was read is answered.

        Only a kernel that doesn't send requests again makes it matter: what was read by a server
        that died then is answered by nobody.
        """
        if self.is_settled != is_settled:
            self.is_settled = is_settled
            self._save()

    def request_id(self, unique: int) -> int:
        """An id of a request that is the same when it is sent again, and no other session's.

        Fits into 63 bits.
        """
        return (self.tag << _UNIQUE_BITS) | (unique & ((1 << _UNIQUE_BITS) - 1))

    def accept(self, body: bytes, *, passthrough: bool) -> bytes:
        """Agree on INIT: keep the agreement, then return the reply's bytes.

        Args:
            body: of the INIT request.
            passthrough: ask for it.

        Raises:
            UnusableError: the kernel is too old (EPROTO).
        """
        major, minor, readahead, low = wire.INIT_IN.unpack_from(body)
        if major < wire.KERNEL_MAJOR or (major == wire.KERNEL_MAJOR and minor < wire.OLDEST_MINOR):
            msg = f"kernel speaks fuse {major}.{minor}, 7.{wire.OLDEST_MINOR} is needed"
            raise UnusableError(msg, hint="use Linux 5.4 or newer", errno_value=errno.EPROTO)
        if major > wire.KERNEL_MAJOR:
            # The kernel asks again in our version.
            return wire.INIT_OUT.pack(
                wire.KERNEL_MAJOR, wire.KERNEL_MINOR, *([0] * (len(_INIT_FIELDS) - 2))
            )
        high = 0
        if low & InitFlag.INIT_EXT:
            (high,) = wire.INIT_IN_EXT.unpack_from(body, wire.INIT_IN.size)
        wanted = _WANTED | (InitFlag.PASSTHROUGH if passthrough else 0)
        agreed = int(wanted) & (low | high << 32)
        depth = self.max_stack_depth if agreed & InitFlag.PASSTHROUGH else 0
        self.negotiated = Negotiated(minor=minor, flags=agreed, max_stack_depth=depth)
        self._save()
        return wire.INIT_OUT.pack(
            wire.KERNEL_MAJOR,
            min(minor, wire.KERNEL_MINOR),
            max(readahead, MAX_IO_BYTES),
            agreed & 0xFFFFFFFF,
            _BACKGROUND_MAX,
            _CONGESTION,
            MAX_IO_BYTES,
            1,
            MAX_IO_BYTES // _PAGE_BYTES,
            0,
            agreed >> 32,
            depth,
            0,
        )

    def _save(self) -> None:
        """Replace the state file; a kill at any moment leaves the old or the new one."""
        if self.state_path is None:
            return
        temporary = f"{self.state_path}.tmp"
        with open(temporary, "wb") as file:
            file.write(self.state())
        os.replace(temporary, self.state_path)


_INIT_FIELDS: Final = (
    "major",
    "minor",
    "max_readahead",
    "flags",
    "max_background",
    "congestion_threshold",
    "max_write",
    "time_gran",
    "max_pages",
    "map_alignment",
    "flags2",
    "max_stack_depth",
    "request_timeout",
)
