"""What can go wrong, grouped by what the caller would do about it.

Every error is an `OSError` that carries an errno (so that it reaches the kernel as itself and never
as EINVAL by accident), a stable `kind`, the `subject` it is about, a `hint` that can be typed, and
the exit code with which the command line ends. Errors survive pickling. This module imports nothing
of the project.
"""

from __future__ import annotations

import enum
import errno
from typing import Any

__all__ = [
    "BusyError",
    "CkptError",
    "ConfigError",
    "ErrorKind",
    "ExistsError",
    "ExitCode",
    "FormatVersionError",
    "FullError",
    "InDoubtError",
    "IntegrityError",
    "InvalidNameError",
    "MisplacedError",
    "MissingError",
    "NotCopiedError",
    "PendingError",
    "RefusedError",
    "TransientStoreError",
    "UnusableError",
    "UsageError",
    "WouldBlockError",
]


class ExitCode(enum.IntEnum):
    """How a `ckptgate` command ends; documented in README."""

    OK = 0
    INTERNAL = 1
    PENDING = 2
    REFUSED = 3
    NOT_FOUND = 4
    INTEGRITY = 5
    UNUSABLE = 6
    BUSY = 7
    USAGE = 64


class ErrorKind(enum.StrEnum):
    """Stable names of errors, for logs, metrics and `--json`; append only."""

    INTERNAL = "internal"
    USAGE = "usage"
    CONFIG = "config"
    INVALID_NAME = "invalid-name"
    NOT_FOUND = "not-found"
    EXISTS = "exists"
    REFUSED = "refused"
    PENDING = "pending"
    IN_DOUBT = "in-doubt"
    INTEGRITY = "integrity"
    FORMAT_VERSION = "format-version"
    UNUSABLE = "unusable"
    BUSY = "busy"
    FULL = "full"
    TRANSIENT_STORE = "transient-store"
    WOULD_BLOCK = "would-block"


class CkptError(OSError):
    """Base of all errors of ckptgate.

    Attributes:
        kind: stable name of the group.
        subject: what it is about (a path, a key, an attempt), or "".
        hint: a next step, where possible a command, or "".
        exit_code: how the command line ends with it.
    """

    kind: ErrorKind = ErrorKind.INTERNAL
    exit_code: ExitCode = ExitCode.INTERNAL
    errno_value: int = errno.EIO

    def __init__(
        self, message: str, *, subject: str = "", hint: str = "", errno_value: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject
        self.hint = hint
        if hint:
            # So that a traceback has it, too.
            self.add_note(f"hint: {hint}")
        # An OSError without an errno would reach the kernel as EINVAL.
        self.errno = self.errno_value if errno_value is None else errno_value

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"subject": self.subject, "hint": self.hint, "errno": self.errno}
        return (type(self), (self.message,), state)


class UsageError(CkptError):
    """The command line or a call has wrong arguments."""

    kind = ErrorKind.USAGE
    exit_code = ExitCode.USAGE
    errno_value = errno.EINVAL


class ConfigError(UsageError):
    """The configuration file or environment has a wrong key or value."""

    kind = ErrorKind.CONFIG


class InvalidNameError(CkptError):
    """A name that cannot be stored (too long, not UTF-8, control characters, `..`)."""

    kind = ErrorKind.INVALID_NAME
    exit_code = ExitCode.REFUSED
    errno_value = errno.EINVAL


class NotCopiedError(InvalidNameError):
    """It is published, but not under plain names as well: one of these cannot be stored."""


class MissingError(CkptError):
    """What was asked for is not there."""

    kind = ErrorKind.NOT_FOUND
    exit_code = ExitCode.NOT_FOUND
    errno_value = errno.ENOENT


class ExistsError(CkptError):
    """Something else is already there under that name."""

    kind = ErrorKind.EXISTS
    exit_code = ExitCode.REFUSED
    errno_value = errno.EEXIST


class RefusedError(CkptError):
    """A rule forbids it; asking again changes nothing."""

    kind = ErrorKind.REFUSED
    exit_code = ExitCode.REFUSED
    errno_value = errno.EPERM


class PendingError(CkptError):
    """Not decided yet, within the time that was given."""

    kind = ErrorKind.PENDING
    exit_code = ExitCode.PENDING
    errno_value = errno.ETIMEDOUT


class InDoubtError(CkptError):
    """The outcome of a request is unknown and could not be read back yet."""

    kind = ErrorKind.IN_DOUBT
    exit_code = ExitCode.REFUSED
    errno_value = errno.EIO


class IntegrityError(CkptError):
    """Bytes differ from what their digest says, or a document is torn, edited or hostile."""

    kind = ErrorKind.INTEGRITY
    exit_code = ExitCode.INTEGRITY
    errno_value = errno.EIO


class FormatVersionError(CkptError):
    """A store or spool was written by another format version."""

    kind = ErrorKind.FORMAT_VERSION
    exit_code = ExitCode.UNUSABLE
    errno_value = errno.EPROTONOSUPPORT


class UnusableError(CkptError):
    """A store, spool or mount point is missing, read-only, or lacks a needed ability."""

    kind = ErrorKind.UNUSABLE
    exit_code = ExitCode.UNUSABLE
    errno_value = errno.EIO


class MisplacedError(UnusableError):
    """Something else is in the place of what should be there: a symlink, a device, a file."""


class BusyError(CkptError):
    """Somebody else holds it."""

    kind = ErrorKind.BUSY
    exit_code = ExitCode.BUSY
    errno_value = errno.EBUSY


class FullError(CkptError):
    """No space or quota left."""

    kind = ErrorKind.FULL
    exit_code = ExitCode.UNUSABLE
    errno_value = errno.ENOSPC


class TransientStoreError(CkptError):
    """Nothing is known about the request to the store; call again."""

    kind = ErrorKind.TRANSIENT_STORE
    exit_code = ExitCode.UNUSABLE
    errno_value = errno.EIO


class WouldBlockError(CkptError):
    """The call needs the store or has to wait: repeat it where blocking is allowed."""

    kind = ErrorKind.WOULD_BLOCK
    errno_value = errno.EAGAIN
