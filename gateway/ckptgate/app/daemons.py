"""Finding the daemon that serves a store to the clients of `ckpt://`, or starting one.

Owns the rule: one daemon a spool, whoever starts it. A mount of the store is one; else one without
a mount is started, by the first of all processes that look for it at the same time. Any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from ckptgate.app.addresses import store_address, store_identity
from ckptgate.app.config import (
    Config,
    ConfigFile,
    default_spool,
    load_config_file,
    make_config,
    read_saved_config,
    s3_options,
)
from ckptgate.app.registry import MountInfo, list_mounts
from ckptgate.errors import ConfigError, UnusableError, UsageError
from ckptgate_adapters.channels import RemoteError
from ckptgate_adapters.fsspec_ckpt.wire import CLIENT_SOCKET
from ckptgate_adapters.sqlite_spool import SpoolLock, check_local

__all__ = ["LOG_FILE", "Wanted", "daemon_config", "reach", "start_command"]

LOG_FILE: Final = "ckptgate.log"
_START_LOCK: Final = "start.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a client says of its store; "" is left to the configuration file and environment.

    Attributes:
        store, spool: as `ckptgate mount` takes them.
        config: path of a configuration file.
        endpoint_url, profile, region: of a bucket.
        idle_exit_s: a daemon that is started ends when it wasn't needed for so long.
    """

    store: str = ""
    spool: str = ""
    config: str = ""
    endpoint_url: str = ""
    profile: str = ""
    region: str = ""
    idle_exit_s: float = 60.0


def daemon_config(wanted: Wanted) -> Config:
    """The configuration of a daemon without a mount.

    Raises:
        UsageError, ConfigError: something is missing or wrong.
    """
    path = wanted.config or os.environ.get("CKPTGATE_CONFIG", "")
    file = load_config_file(path) if path else ConfigFile()
    store = wanted.store or file.store
    spool = wanted.spool or file.spool
    if not store and spool:
        with contextlib.suppress(OSError, ConfigError):
            # Whoever served that spool before knows.
            return read_saved_config(os.path.realpath(os.path.expanduser(spool)))
    if not store:
        msg = "no store is given"
        hint = "store=, FSSPEC_CKPT_STORE, CKPTGATE_CONFIG, or ckpt::s3://BUCKET/PREFIX"
        raise UsageError(msg, hint=hint)
    s3 = s3_options(
        file.s3,
        os.environ,
        endpoint_url=wanted.endpoint_url,
        profile=wanted.profile,
        region=wanted.region,
    )
    if not spool:
        spool = default_spool(store_identity(store_address(store), s3.endpoint_url), "")
    return make_config(file, store=store, mountpoint="", spool=spool, s3=s3, has_mount=False)


def reach(config: Config, wanted: Wanted, *, is_needed: bool, may_start: bool) -> str:
    """The spool in which a daemon answers that serves the configured store.

    Args:
        config: of the daemon.
        wanted: what the client said.
        is_needed: nobody answered there: start one.
        may_start: whether to.

    Raises:
        UsageError: the spool is another store's.
        CkptError: a daemon can't be started.
    """
    spool = config.spool
    if not wanted.spool and not os.path.exists(os.path.join(spool, CLIENT_SOCKET)):
        spool = _served(config) or spool
    if not is_needed:
        _check_store(spool, config)
        return spool
    if SpoolLock(spool).holder() is None:
        if not may_start:
            msg = f"no daemon runs in {spool}"
            raise UnusableError(msg, subject=spool)
        _start(config, wanted)
        return config.spool
    # Its supervisor starts what died again.
    return spool


def _served(config: Config) -> str:
    """The spool of a mount or daemon here that serves the store and that this user may use."""
    found = [
        info.spool
        for info in list_mounts()
        if info.store == config.store and _is_usable(info) and _is_same_service(info, config)
    ]
    if len(found) > 1:
        msg = f"{config.store} is served by several daemons here: {', '.join(found)}"
        raise UsageError(msg, subject=config.store, hint=f"say spool={found[0]!r}")
    return found[0] if found else ""


def _is_usable(info: MountInfo) -> bool:
    return os.access(os.path.join(info.spool, CLIENT_SOCKET), os.W_OK)


def _is_same_service(info: MountInfo, config: Config) -> bool:
    with contextlib.suppress(OSError, ConfigError):
        return read_saved_config(info.spool).s3.endpoint_url == config.s3.endpoint_url
    return False


def _check_store(spool: str, config: Config) -> None:
    try:
        served = read_saved_config(spool)
    except (OSError, ConfigError):
        return
    ours = store_identity(config.store, config.s3.endpoint_url)
    if store_identity(served.store, served.s3.endpoint_url) != ours:
        msg = f"the spool {spool} is for the store {served.store}, not for {config.store}"
        raise UsageError(msg, subject=spool, hint="say another spool=")


def start_command(config: Config, *words: str) -> list[str]:
    """The command that serves as configured, in the foreground."""
    python = sys.executable or shutil.which("python3") or "python3"
    command = [python, "-P", "-m", "ckptgate.app.cli", "serve", "--store", config.store]
    command += ["--spool", config.spool, *words]
    for name in ("endpoint_url", "profile", "region"):
        if value := getattr(config.s3, name):
            command += [f"--{name.replace('_', '-')}", value]
    return command


@contextlib.contextmanager
def _alone(spool: str) -> Generator[None]:
    """Only one process of this machine at a time starts a daemon of the spool."""
    fd = os.open(os.path.join(spool, _START_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        # A child that was forked meanwhile has the descriptor, too: its close alone is no end.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _start(config: Config, wanted: Wanted) -> None:
    """Start a daemon and wait until it serves; nothing, if somebody else has just done it."""
    check_local(config.spool)
    try:
        os.makedirs(config.spool, mode=0o700, exist_ok=True)
    except OSError as exc:
        msg = f"cannot use the spool {config.spool}: {exc.strerror}"
        raise UnusableError(
            msg, subject=config.spool, hint="say spool=DIR on a local disk"
        ) from exc
    with _alone(config.spool):
        if SpoolLock(config.spool).holder() is None:
            _start_alone(config, wanted)


def _start_alone(config: Config, wanted: Wanted) -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    words = ["--ready-fd", str(writer), "--idle-exit", str(wanted.idle_exit_s)]
    path = wanted.config or os.environ.get("CKPTGATE_CONFIG", "")
    if path:
        words += ["--config", os.path.abspath(path)]
    try:
        with open(os.path.join(config.spool, LOG_FILE), "ab") as log:
            process = subprocess.Popen(
                start_command(config, *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                start_new_session=True,
                cwd="/",
            )
    finally:
        os.close(writer)
    # It outlives this process, which must not be asked for it at its end.
    process.returncode = 0
    with os.fdopen(reader, "rb") as stream:
        line = stream.readline()
    if not line:
        msg = f"the daemon of {config.spool} ended before it served"
        hint = f"see {config.spool}/{LOG_FILE}"
        raise UnusableError(msg, subject=config.spool, hint=hint)
    answer = json.loads(line)
    if "error" in answer:
        raise RemoteError.of(answer["error"])
