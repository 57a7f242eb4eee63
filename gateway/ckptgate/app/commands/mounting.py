"""`mount`, `umount`, `drain`: begin, end, and finish what is under way."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from typing import Any, Final

from ckptgate.app.asking import ask
from ckptgate.app.client_files import refuse_open_clients
from ckptgate.app.commands.options import add_s3_options, s3_of
from ckptgate.app.commands.output import add_json, print_json
from ckptgate.app.config import Config, ConfigFile, load_config_file, make_config
from ckptgate.app.left import forget_left, read_left, told
from ckptgate.app.locate import require_daemon, require_mount
from ckptgate.app.logs import configure_logging
from ckptgate.app.mountpoints import end_session, is_dead_mount, prepare_mountpoint, resolve
from ckptgate.app.reach import refuse_stopped
from ckptgate.app.registry import MountInfo, find_mount
from ckptgate.app.stores import probe_store
from ckptgate.errors import (
    BusyError,
    CkptError,
    ErrorKind,
    ExitCode,
    PendingError,
    UnusableError,
    UsageError,
)
from ckptgate_adapters.channels import RemoteError, control_call, error_reply
from ckptgate_adapters.fuse.channel import unmount
from ckptgate_adapters.sqlite_spool import SpoolLock, check_local

__all__ = ["add_commands", "unmount_and_drain"]

LOG_FILE: Final = "ckptgate.log"
_EXIT_MARGIN_S: Final = 20.0
_HOLD_MARGIN_S: Final = 5.0
_PAUSE_S: Final = 0.1
_BUSY_TRIES: Final = 3
_MANAGERS: Final = frozenset({
    "LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC",
})  # fmt: skip


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    mount = commands.add_parser("mount", help="mount a store's gateway on a directory")
    mount.add_argument(
        "places",
        nargs="*",
        metavar="STORE MOUNTPOINT",
        help="directory or s3://BUCKET/PREFIX, and where to mount it; the file has what isn't said",
    )
    mount.add_argument("--spool", default="", metavar="DIR", help="local staging directory")
    mount.add_argument(
        "--spool-max", default="", metavar="SIZE", help="what the spool may take, such as 500GiB"
    )
    add_s3_options(mount)
    mount.add_argument("--config", default="", metavar="FILE", help="TOML, see README")
    mount.add_argument("--foreground", action="store_true", help="stay in the foreground")
    mount.add_argument(
        "--replace",
        action="store_true",
        help="go on with what is mounted there, by this ckptgate and this configuration",
    )
    mount.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    mount.set_defaults(handler=_mount)
    umount = commands.add_parser("umount", help="unmount and finish what can be finished")
    umount.add_argument("mountpoint", metavar="MOUNTPOINT")
    umount.add_argument("--timeout", type=float, default=30.0, metavar="S", help="to finish in")
    umount.add_argument("--lazy", action="store_true", help="detach even while files are open")
    umount.set_defaults(handler=_umount)
    drain = commands.add_parser("drain", help="finish what is under way; begin nothing meanwhile")
    drain.add_argument(
        "place", metavar="PLACE", help="a mount point, or a store or spool that is served without"
    )
    drain.add_argument("--timeout", type=float, default=60.0, metavar="S", help="to finish in")
    add_json(drain)
    drain.set_defaults(handler=_drain)


def _mount(args: argparse.Namespace) -> int:
    config = _config_of(args)
    if not args.foreground:
        if args.replace:
            from ckptgate.app.replacing import check_replaceable  # noqa: PLC0415 - as in `_serve`

            check_replaceable(config)
        else:
            _check_before(config)
        _mount_in_background(config, args)
        return ExitCode.OK
    configure_logging(config.log_level, process="supervisor", form=config.log.format)
    try:
        is_all_stored = _serve(config, args)
    except CkptError as exc:
        if args.ready_fd is not None:
            _tell_parent(args.ready_fd, exc)
        raise
    return ExitCode.OK if is_all_stored else ExitCode.PENDING


def _serve(config: Config, args: argparse.Namespace) -> bool:
    """Supervise until it is unmounted; whether everything is in the store then."""
    # Whoever mounts in the background, unmounts or drains needs nothing of it.
    from ckptgate.app.keeping import held_by_manager  # noqa: PLC0415 - see above
    from ckptgate.app.replacing import successor  # noqa: PLC0415 - see above
    from ckptgate.app.supervisor import Supervisor  # noqa: PLC0415 - see above

    if args.replace:
        return successor(config).run(args.ready_fd)
    is_background = args.ready_fd is not None
    held = None if is_background else held_by_manager(config)
    return Supervisor(config, held=held, is_background=is_background).run(args.ready_fd)


def _config_of(args: argparse.Namespace) -> Config:
    """What the command line and its file say; of a mount that goes on without any, what it has."""
    store, mountpoint = _places(args.places)
    if mountpoint and args.replace and _says_nothing(args):
        from ckptgate.app.replacing import running_config  # noqa: PLC0415 - as in `_serve`

        return running_config(resolve(mountpoint))
    file = load_config_file(args.config) if args.config else ConfigFile()
    mountpoint = mountpoint or file.mountpoint
    return make_config(
        file,
        store=store,
        mountpoint=resolve(mountpoint) if mountpoint else "",
        spool=args.spool,
        spool_max=args.spool_max,
        s3=s3_of(args, file),
    )


def _places(words: list[str]) -> tuple[str, str]:
    """STORE and MOUNTPOINT, "" for what isn't said; one word alone is the mount point.

    Raises:
        UsageError: there are more words.
    """
    if len(words) > 2:
        msg = f"mount takes a store and a mount point, not {len(words)} words"
        raise UsageError(msg, hint="ckptgate mount STORE MOUNTPOINT")
    store, mountpoint = ["", "", *words][-2:]
    return store, mountpoint


def _says_nothing(args: argparse.Namespace) -> bool:
    """Whether only the mount point is given."""
    names = ("config", "spool", "spool_max", "endpoint_url", "profile", "region")
    return len(args.places) < 2 and not any(getattr(args, name) for name in names)


def _check_before(config: Config) -> None:
    """What can be refused before anything is made or written.

    Raises:
        CkptError: it can't be mounted.
    """
    check_local(config.spool)
    if (holder := SpoolLock(config.spool).holder()) is not None:
        who = f"pid {holder.get('pid')}, mounted on {holder.get('mountpoint')}"
        msg = f"the spool {config.spool} is in use: {who}, since {holder.get('since')}"
        raise BusyError(msg, subject=config.spool, hint="--spool DIR, or unmount that one")
    probe_store(config)
    prepare_mountpoint(config.mountpoint)


def _tell_parent(ready_fd: int, exc: CkptError) -> None:
    try:
        os.write(ready_fd, json.dumps({"error": error_reply(exc)}).encode() + b"\n")
    except OSError:
        return  # it was ready once and the parent is gone: the log has the error


def _mount_in_background(config: Config, args: argparse.Namespace) -> None:
    """Start this same command in the foreground of a session of its own; wait until it serves."""
    before = find_mount(config.mountpoint)
    reader, writer = os.pipe()
    command = [sys.executable, "-P", "-m", "ckptgate.app.cli", "mount", "--foreground"]
    command += ["--ready-fd", str(writer), *_words_of(config, args)]
    try:
        os.makedirs(config.spool, mode=0o700, exist_ok=True)
        log = open(os.path.join(config.spool, LOG_FILE), "ab")  # noqa: SIM115 - given to the child
    except OSError as exc:
        msg = f"cannot use the spool {config.spool}: {exc.strerror}"
        raise UnusableError(
            msg, subject=config.spool, hint="--spool DIR on a writable local disk"
        ) from exc
    with log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(writer,),
            start_new_session=True,
            cwd="/",
            # It is nobody's service, even where this command is run by one.
            env={name: value for name, value in os.environ.items() if name not in _MANAGERS},
        )
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        line = stream.readline()
    if not line:
        msg = f"the daemon ended before {config.mountpoint} was usable"
        raise UnusableError(msg, subject=config.mountpoint, hint=f"see {log.name}")
    answer = json.loads(line)
    if "error" in answer:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_MARGIN_S)
        raise RemoteError.of(answer["error"])
    what = f"mounted {config.store}"
    if args.replace and before is not None:
        what = f"replaced process {before.pid} by {process.pid}: {config.store}"
    print(f"{what} on {config.mountpoint} (spool {config.spool})")


def _words_of(config: Config, args: argparse.Namespace) -> list[str]:
    """The command line that means the same to another process."""
    words = ["--replace"] if args.replace else []
    if args.replace and _says_nothing(args):
        return [*words, config.mountpoint]
    words += ["--spool", config.spool]
    if args.spool_max:
        words += ["--spool-max", args.spool_max]
    if args.config:
        words += ["--config", os.path.abspath(args.config)]
    for name in ("endpoint_url", "profile", "region"):
        if value := getattr(config.s3, name):
            words += [f"--{name.replace('_', '-')}", value]
    return [*words, config.store, config.mountpoint]


def _umount(args: argparse.Namespace) -> int:
    path = resolve(args.mountpoint)
    if find_mount(path) is None and is_dead_mount(path):
        end_session(path)
        print(f"removed the mount {path}, whose daemon had died", file=sys.stderr)
        print("what it had staged is in its spool: mount it again", file=sys.stderr)
        return ExitCode.PENDING
    mount = find_mount(path) or require_mount(path)
    if mount.mountpoint != path:
        msg = f"{path} is in the mount {mount.mountpoint}, and is no mount point itself"
        raise UsageError(msg, subject=path, hint=f"ckptgate umount {mount.mountpoint}")
    left = unmount_and_drain(mount, timeout_s=args.timeout, lazy=args.lazy)
    if not left:
        print(f"unmounted {mount.mountpoint}: everything is in the store")
        return ExitCode.OK
    for row in left:
        print(f"left in the spool: {told(row)}", file=sys.stderr)
    print(
        f"unmounted {mount.mountpoint}: {len(left)} unfinished; the spool {mount.spool} keeps "
        "them, the next mount goes on",
        file=sys.stderr,
    )
    return ExitCode.PENDING


def _drain(args: argparse.Namespace) -> int:
    mount = require_daemon(args.place)
    left = _finish(mount, args.timeout)
    if args.json:
        print_json({"mountpoint": mount.mountpoint, "spool": mount.spool, "left": left})
    elif not left:
        print(f"drained {mount.place}: everything is in the store")
    for row in [] if args.json else left:
        print(f"left: {told(row)}", file=sys.stderr)
    return ExitCode.PENDING if left else ExitCode.OK


def _finish(mount: MountInfo, timeout_s: float) -> list[dict[str, Any]]:
    """Have no checkpoint begun until nothing is left, nothing moves or the time is over.

    Returns:
        What is left.
    """
    deadline = time.monotonic() + timeout_s
    # It ends by itself, should this process be killed.
    hold = {"op": "hold", "why": "drain", "for_s": timeout_s + _HOLD_MARGIN_S}
    ask(mount, {**hold, "refuses": True, "timeout_s": timeout_s})
    try:
        while True:
            found: dict[str, Any] = ask(mount, {"op": "left"})
            left: list[dict[str, Any]] = found["left"]
            if not left or not found["is_moving"] or time.monotonic() >= deadline:
                return left
            time.sleep(_PAUSE_S)
    finally:
        ask(mount, {**hold, "refuses": False})


def _unmount(mount: MountInfo, *, lazy: bool) -> None:
    try:
        _unmount_soon(mount, lazy=lazy)
    except BusyError:
        raise
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            msg = f"{mount.mountpoint} is busy: a file is open in it or a process works there"
            hint = f"fuser -vm {mount.mountpoint} names it; --lazy detaches all the same"
            raise BusyError(msg, subject=mount.mountpoint, hint=hint) from exc
        msg = f"cannot unmount {mount.mountpoint}: {exc.strerror or exc}"
        raise UnusableError(msg, subject=mount.mountpoint) from exc


def _unmount_soon(mount: MountInfo, *, lazy: bool) -> None:
    """Unmount, also where somebody just looks (a watch, updatedb).

    Raises:
        BusyError: a process has files open by `ckpt://`.
        OSError: it can't be.
    """
    for tries_left in reversed(range(_BUSY_TRIES + 1)):
        try:
            if not lazy:
                refuse_open_clients(mount)
            unmount(mount.mountpoint, lazy=lazy)
        except OSError as exc:
            if exc.errno != errno.EBUSY or not tries_left:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def unmount_and_drain(mount: MountInfo, *, timeout_s: float, lazy: bool) -> list[dict[str, Any]]:
    """Unmount, let the daemon finish what it can, and return what is left.

    Raises:
        BusyError: files are open; the mount goes on.
        PendingError: the daemon didn't end.
        UnusableError: one of its processes is stopped, and could not end; the mount goes on.
    """
    if not lazy:
        refuse_stopped(mount)
    try:
        control_call(mount.spool, {"op": "drain", "timeout_s": timeout_s})
    except UnusableError as exc:
        if exc.kind is not ErrorKind.UNUSABLE:
            raise
    forget_left(mount.spool)
    _unmount(mount, lazy=lazy)
    deadline = time.monotonic() + timeout_s + _EXIT_MARGIN_S
    while mount.is_alive:
        if time.monotonic() > deadline:
            msg = f"the daemon of {mount.mountpoint} (pid {mount.pid}) has not ended"
            hint = f"see {mount.spool}/{LOG_FILE}"
            if lazy:
                hint = "it is detached and ends once no file is open in it any more; " + hint
            raise PendingError(msg, subject=mount.mountpoint, hint=hint)
        time.sleep(0.05)
    try:
        return read_left(mount.spool)
    except FileNotFoundError:
        msg = "the publisher did not say what is left"
        return [{"name": mount.spool, "state": "unknown", "missing": [msg]}]
