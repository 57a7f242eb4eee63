"""Mounting, unmounting and aborting; ioctls and unasked messages on the device descriptor.

Owns the rule that nothing here touches the mounted tree itself (a stat of a dead mount never
returns): what must be known of a mount is read from /proc/self/mountinfo. Any thread.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
from dataclasses import dataclass
from typing import Final

from ckptgate.errors import UnusableError
from ckptgate_adapters.fuse import wire

__all__ = [
    "MountOptions",
    "abort",
    "backing_close",
    "backing_open",
    "connection_of",
    "fallocate",
    "mount",
    "send_notification",
    "unmount",
]

_log = logging.getLogger(__name__)

_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MNT_FORCE: Final = 1
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_HELPER_TIMEOUT_S: Final = 30.0
_DEVICE: Final = "/dev/fuse"
_CONNECTIONS: Final = "/sys/fs/fuse/connections"
_BACKING_DEVICES: Final = "/sys/class/bdi"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """How a mount is made.

    Attributes:
        fsname: what `mount` shows as its source.
        subtype: the file system type is `fuse.<subtype>`.
        allow_other: let other users in (their rights are checked by the kernel).
        max_read: largest READ, bytes.
    """

    fsname: str = "ckptgate"
    subtype: str = "ckptgate"
    allow_other: bool = True
    max_read: int = 1 << 20


def mount(mountpoint: str, options: MountOptions | None = None) -> int:
    """Mount at *mountpoint* and return the device descriptor (close-on-exec).

    With the right to mount by mount(2), else by fusermount3, there without `allow_other` where
    /etc/fuse.conf forbids it.

    Raises:
        UnusableError: neither way works; the message says why.
    """
    options = options or MountOptions()
    path = os.path.realpath(mountpoint)
    try:
        fd = _mount_directly(path, options)
    except PermissionError as exc:
        _log.debug("mount-needs-helper mountpoint=%s reason=%s", path, exc)
        return _mount_by_helper(path, options)
    except OSError as exc:
        raise _cannot_mount(path, exc) from exc
    _widen_readahead(path, options.max_read)
    return fd


def _widen_readahead(path: str, size: int) -> None:
    """Have the kernel read as much at once as one READ may ask for; by default it is 128 KiB.

    Who reads a file that doesn't pass through then costs an eighth of the requests. Only root may
    say so, and only where /sys can be written; all works without.
    """
    device = _device_of(path)
    if device is None:
        return
    where = f"{_BACKING_DEVICES}/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    try:
        with open(where, "w", encoding="ascii") as file:
            file.write(str(size // 1024))
    except OSError as exc:
        _log.info("readahead-left-narrow mountpoint=%s reason=%s", path, exc.strerror)


def _cannot_mount(path: str, exc: OSError) -> UnusableError:
    hint = ""
    if exc.errno in {errno.ENOENT, errno.ENODEV} and not os.path.exists(_DEVICE):
        hint = "modprobe fuse"
    elif exc.errno == errno.ENOTCONN:
        hint = f"umount -l {path}"
    msg = f"cannot mount at {path!r}: {exc.strerror or exc}"
    return UnusableError(msg, subject=path, hint=hint)


def _mount_directly(path: str, options: MountOptions) -> int:
    try:
        root_mode = os.stat(path).st_mode & 0o170000
    except OSError as exc:
        if exc.errno not in {errno.ENOTCONN, errno.ECONNABORTED}:
            raise
        # A dead mount, to be mounted over.
        root_mode = stat.S_IFDIR
    fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    data = (
        f"fd={fd},rootmode={root_mode:o},user_id={os.getuid()},group_id={os.getgid()},"
        f"default_permissions,max_read={options.max_read}"
    )
    if options.allow_other:
        data += ",allow_other"
    result = _libc.mount(
        os.fsencode(options.fsname),
        os.fsencode(path),
        f"fuse.{options.subtype}".encode(),
        ctypes.c_ulong(_MS_NOSUID | _MS_NODEV),
        data.encode(),
    )
    if result:
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, os.strerror(number), path)
    return fd


def _mount_by_helper(path: str, options: MountOptions) -> int:
    helper = shutil.which("fusermount3")
    if helper is None:
        msg = f"cannot mount at {path!r}: no right to mount and no fusermount3"
        raise UnusableError(msg, subject=path, hint="apt install fuse3")
    # A comma would end the option.
    fsname = options.fsname.replace("\\", "\\\\").replace(",", "\\,")
    common = (
        f"fsname={fsname},subtype={options.subtype},default_permissions,"
        f"max_read={options.max_read},nosuid,nodev"
    )
    problem = ""
    for text in [f"{common},allow_other", common] if options.allow_other else [common]:
        fd, problem = _run_helper(helper, path, text)
        if fd >= 0:
            if text == common and options.allow_other:
                _log.warning(
                    "allow-other-refused mountpoint=%s hint='add user_allow_other to fuse.conf'",
                    path,
                )
            return fd
    msg = f"cannot mount at {path!r}: {problem}"
    hint = "" if os.access(_DEVICE, os.R_OK | os.W_OK) else f"sudo chmod a+rw {_DEVICE}"
    raise UnusableError(msg, subject=path, hint=hint)


def _run_helper(helper: str, path: str, options: str) -> tuple[int, str]:
    """Returns (descriptor, "") or (-1, why)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        done = subprocess.run(
            [helper, "-o", options, "--", path],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_HELPER_TIMEOUT_S,
            check=False,
        )
        theirs.close()
        fds = array.array("i")
        _, control, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: fds.itemsize])
    if not fds:
        text = done.stderr.decode(errors="replace").strip()
        return -1, text or f"fusermount3 ended with {done.returncode}"
    os.set_inheritable(fds[0], False)
    return fds[0], ""


def _absolute(mountpoint: str) -> str:
    """The path without symlinks, found without touching what is mounted at its end."""
    parent, name = os.path.split(os.path.abspath(mountpoint))
    return os.path.join(os.path.realpath(parent), name)


def _umount2(path: str, flags: int) -> int:
    """Returns the errno, 0 for success."""
    if _libc.umount2(os.fsencode(path), flags | _UMOUNT_NOFOLLOW) == 0:
        return 0
    return ctypes.get_errno()


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount; *lazy* detaches at once, and the session ends when its last file is closed.

    Raises:
        OSError: EBUSY, somebody uses it (not with *lazy*); EINVAL, nothing is mounted there.
    """
    path = _absolute(mountpoint)
    number = _umount2(path, _MNT_DETACH if lazy else 0)
    if number == 0:
        return
    helper = shutil.which("fusermount3")
    if number != errno.EPERM or helper is None:
        raise OSError(number, os.strerror(number), path)
    command = [helper, "-u", "-q", *(["-z"] if lazy else []), "--", path]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_HELPER_TIMEOUT_S, check=False)
    if done.returncode:
        raise OSError(errno.EBUSY, f"fusermount3 -u ended with {done.returncode}", path)


def connection_of(mountpoint: str) -> int | None:
    """The number of the mount's connection in /sys/fs/fuse/connections; None if not mounted."""
    found = _device_of(mountpoint)
    return None if found is None else os.minor(found) | (os.major(found) << 20)


def _device_of(mountpoint: str) -> int | None:
    """Device number of the FUSE mount there; None if there is none."""
    path = _absolute(mountpoint)
    found: int | None = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split(" ")
            if _unescape(fields[4]) != path:
                continue
            is_fuse = fields[fields.index("-") + 1].startswith("fuse")
            # The last line is the mount on top.
            major, minor = (int(part) for part in fields[2].split(":"))
            found = os.makedev(major, minor) if is_fuse else None
    return found


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def abort(mountpoint: str) -> None:
    """End the kernel session of a mount: every waiting call gets ENOTCONN or ECONNABORTED.

    Through the control file system; where that is not mounted, by a forced unmount, which aborts
    the session even if the mount itself is in use and stays.

    Raises:
        UnusableError: nothing is mounted there.
        OSError: EPERM, only its owner may.
    """
    number = connection_of(mountpoint)
    if number is None:
        msg = f"nothing of type fuse is mounted at {mountpoint!r}"
        raise UnusableError(msg, subject=mountpoint, errno_value=errno.EINVAL)
    control = f"{_CONNECTIONS}/{number}/abort"
    try:
        with open(control, "w", encoding="ascii") as file:
            file.write("1")
    except FileNotFoundError:
        # In use by this descriptor, the mount itself stays: nobody finds the directory below it.
        holder = os.open(_absolute(mountpoint), os.O_PATH | os.O_CLOEXEC)
        try:
            number = _umount2(_absolute(mountpoint), _MNT_FORCE)
        finally:
            os.close(holder)
        if number not in {0, errno.EBUSY}:
            raise OSError(number, os.strerror(number), mountpoint) from None


def backing_open(device: int, fd: int) -> int:
    """Register an open file for passthrough; returns its id (positive).

    Raises:
        OSError: EPERM (no CAP_SYS_ADMIN, or passthrough was not negotiated), ELOOP (stacked too
            deep), EOPNOTSUPP, ENOTTY (old kernel), or what a lack of resources gives.
    """
    # A mutable buffer makes fcntl.ioctl return the ioctl's own result.
    request = bytearray(wire.BACKING_MAP.pack(fd, 0, 0))
    backing_id: int = fcntl.ioctl(device, wire.IOCTL_BACKING_OPEN, request)
    return backing_id


def backing_close(device: int, backing_id: int) -> None:
    """Forget a registered file; open files go on using it. An unknown id is fine."""
    request = bytearray(wire.BACKING_ID.pack(backing_id))
    with contextlib.suppress(FileNotFoundError):
        fcntl.ioctl(device, wire.IOCTL_BACKING_CLOSE, request)


def send_notification(device: int, message: bytes) -> bool:
    """Send an unasked message; False where the kernel has nothing cached under it.

    Raises:
        OSError: ENODEV, the session is over; EINVAL, the kernel does not know it.
    """
    try:
        os.write(device, message)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Change a file's allocation, with a mode (the os module has it without)."""
    result = _libc.fallocate(
        ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length)
    )
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
