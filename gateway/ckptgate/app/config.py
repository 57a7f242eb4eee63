"""Configuration: a TOML file and the command line become one frozen, strict value.

Only this module and the command line read files and environment for settings; everything below gets
values. An unknown key or a wrong value is a ConfigError that names its place.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from typing import Final

import msgspec

from ckptgate.app.addresses import is_url, store_address, store_identity
from ckptgate.app.sections import (
    CommitSection,
    IncidentsSection,
    LogSection,
    NamesSection,
    ReclaimSection,
    RoomSection,
    S3Section,
    StatusSection,
    StopSection,
    Strict,
)
from ckptgate.errors import ConfigError, UsageError
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.ports.store import VerifyMode

__all__ = [
    "MAX_CONFIG_BYTES",
    "SESSION_FILE",
    "SYSTEM_DIRECTORY",
    "Config",
    "ConfigFile",
    "default_spool",
    "load_config_file",
    "make_config",
    "parse_config",
    "parse_saved_config",
    "read_saved_config",
    "runtime_directory",
    "s3_options",
    "save_config",
    "saved_form",
    "state_directory",
]

MAX_CONFIG_BYTES: Final = 1 << 20
CONFIG_FILE: Final = "config.json"
"""In the spool: what the running mount was configured with."""
SESSION_FILE: Final = "session.state"
"""In the spool: the kernel session that is mounted, for whoever takes it over."""
_LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
SYSTEM_DIRECTORY: Final = "/run/ckptgate"
"""Where root's running mounts are listed, for everybody to see."""


class ConfigFile(Strict, frozen=True, kw_only=True):
    """What the file of `--config` may hold; the command line wins over it.

    Attributes:
        store: directory, `file:///` URL or `s3://bucket/prefix`.
        mountpoint: where it is mounted; the command line names it otherwise.
        spool: local directory for staging.
        job: job key for callers of whom nothing can be read, "" for none (`run:<id>`).
        passthrough: let the kernel read and write staged files itself where it can.
        verify: `size`, `checksum` or `readback`, as far as the store offers it; "" chooses.
        log_level: of the daemon.
        commit, names, room, reclaim, stop, s3, status, log, incidents: see there.
    """

    store: str = ""
    mountpoint: str = ""
    spool: str = ""
    job: str = ""
    passthrough: bool = True
    verify: str = ""
    log_level: str = "INFO"
    commit: CommitSection = CommitSection()
    names: NamesSection = NamesSection()
    room: RoomSection = RoomSection()
    reclaim: ReclaimSection = ReclaimSection()
    stop: StopSection = StopSection()
    s3: S3Section = S3Section()
    status: StatusSection = StatusSection()
    log: LogSection = LogSection()
    incidents: IncidentsSection = IncidentsSection()


_SECTIONS: Final[dict[str, type[Strict]]] = {
    "commit": CommitSection,
    "names": NamesSection,
    "room": RoomSection,
    "reclaim": ReclaimSection,
    "stop": StopSection,
    "s3": S3Section,
    "status": StatusSection,
    "log": LogSection,
    "incidents": IncidentsSection,
}


class Config(ConfigFile, frozen=True, kw_only=True):
    """All that a mount needs to know; paths are absolute, and none of the three is missing."""


def load_config_file(path: str) -> ConfigFile:
    """Read and check a TOML file.

    Raises:
        ConfigError: it can't be read, isn't TOML, or has an unknown key or wrong value.
    """
    try:
        with open(path, "rb") as stream:
            text = stream.read(MAX_CONFIG_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        msg = f"cannot read the configuration {path}: {exc}"
        raise ConfigError(msg, subject=path) from exc
    return parse_config(text, path)


def parse_config(text: str, path: str) -> ConfigFile:
    """Check the TOML that is, or is to be, in the file *path*.

    Raises:
        ConfigError: it isn't TOML, or has an unknown key or wrong value.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        msg = f"cannot read the configuration {path}: {exc}"
        raise ConfigError(msg, subject=path) from exc
    try:
        return msgspec.convert(data, ConfigFile)
    except msgspec.ValidationError as exc:
        msg = f"configuration {path} is not valid: {exc}"
        raise ConfigError(msg, subject=path, hint=f"keys: {', '.join(_all_keys())}") from exc


def _all_keys() -> list[str]:
    """Every key of the file, those of sections with the section's name."""
    keys = [key for key in ConfigFile.__struct_fields__ if key not in _SECTIONS]
    for name, section in _SECTIONS.items():
        keys += [f"{name}.{key}" for key in section.__struct_fields__]
    return keys


def state_directory() -> str:
    """Where spools are by default: `/var/lib/ckptgate` for root, else the user's state folder."""
    if os.geteuid() == 0:
        return "/var/lib/ckptgate"
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(base, "ckptgate")


def runtime_directory() -> str:
    """Where running mounts are listed: `/run/ckptgate` for root, else the user's runtime folder."""
    if os.geteuid() == 0:
        return SYSTEM_DIRECTORY
    base = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(base, "ckptgate") if base else f"/tmp/ckptgate-{os.geteuid()}"  # noqa: S108


def default_spool(store: str, mountpoint: str) -> str:
    """The spool of this pair of store (its identity) and mount point: the same at every start."""
    identity = f"{store}\0{mountpoint}".encode()
    return os.path.join(state_directory(), "spool-" + hashlib.sha256(identity).hexdigest()[:16])


def s3_options(
    file: S3Section,
    environ: Mapping[str, str],
    *,
    endpoint_url: str = "",
    profile: str = "",
    region: str = "",
) -> S3Section:
    """The S3 section; arguments that aren't "" win over the file, and that over the environment.

    What boto takes from the environment stays there, but for where the service is: the commands
    that are given a mount's path must find the same one, whatever their own environment says.

    Raises:
        UsageError, ConfigError: an argument is not what it should be.
    """
    is_heard = environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true"
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if is_heard else ()
    regions = ("AWS_DEFAULT_REGION", "AWS_REGION")
    own_profile = profile or file.profile
    try:
        return msgspec.structs.replace(
            file,
            endpoint_url=endpoint_url or file.endpoint_url or _first(environ, names),
            profile=own_profile,
            # A profile that is named has a region of its own.
            region=region or file.region or ("" if own_profile else _first(environ, regions)),
        )
    except ValueError as exc:
        raise UsageError(str(exc), subject="s3", hint="--endpoint-url https://HOST:PORT") from exc


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def make_config(
    file: ConfigFile,
    *,
    store: str,
    mountpoint: str,
    spool: str,
    spool_max: str = "",
    s3: S3Section | None = None,
    has_mount: bool = True,
) -> Config:
    """The whole configuration; arguments that aren't "" win over the file.

    Without *has_mount* it is of a daemon that serves clients of `ckpt://` only.

    Raises:
        UsageError, ConfigError: something is missing or contradicts something else.
    """
    chosen = store or file.store
    if not chosen:
        msg = "no store is given"
        raise UsageError(msg, hint="ckptgate mount STORE MOUNTPOINT, or `store` in the file")
    root = store_address(chosen)
    if GATEWAY_DIR in root.split("/"):
        msg = f"{root} is in ckptgate's own directory of a store"
        raise UsageError(msg, subject=root, hint=f"mount {root.partition(f'/{GATEWAY_DIR}')[0]}")
    if not mountpoint and has_mount:
        msg = "no mount point is given"
        hint = "ckptgate mount STORE MOUNTPOINT, or `mountpoint` in the file"
        raise UsageError(msg, hint=hint)
    where = os.path.abspath(mountpoint) if has_mount else ""
    section = s3 or file.s3
    identity = store_identity(root, section.endpoint_url)
    staged = spool or file.spool or default_spool(identity, where)
    if is_url(staged):
        msg = f"spool {staged!r} is not a local directory"
        raise UsageError(msg, subject=staged)
    staged = os.path.realpath(os.path.expanduser(staged))
    local = {} if is_url(root) else {"store": root}
    local |= {"mountpoint": where} if where else {}
    _check_apart(**local, spool=staged)
    if file.log_level not in _LOG_LEVELS:
        msg = f"log_level is {file.log_level!r}, not one of {', '.join(_LOG_LEVELS)}"
        raise ConfigError(msg, subject="log_level")
    if file.verify not in {"", *VerifyMode}:
        msg = f"verify is {file.verify!r}, not one of {', '.join(VerifyMode)}"
        raise ConfigError(msg, subject="verify")
    values = {name: getattr(file, name) for name in ConfigFile.__struct_fields__}
    values.update(store=root, spool=staged, mountpoint=where, s3=section)
    if spool_max:
        values["room"] = _with_limit(file.room, spool_max)
    return Config(**values)


def saved_form(config: Config) -> bytes:
    """The configuration for `parse_saved_config`."""
    return msgspec.json.encode(config)


def save_config(config: Config) -> None:
    """Write it into its spool, for commands and for who takes the mount over."""
    path = os.path.join(config.spool, CONFIG_FILE)
    with open(path + ".new", "wb") as stream:
        stream.write(saved_form(config))
    os.replace(path + ".new", path)


def read_saved_config(spool: str) -> Config:
    """What `save_config` wrote into the spool.

    Raises:
        OSError: it can't be read.
        ConfigError: another release wrote it.
    """
    path = os.path.join(spool, CONFIG_FILE)
    with open(path, "rb") as stream:
        return parse_saved_config(stream.read(MAX_CONFIG_BYTES), path)


def parse_saved_config(data: bytes, path: str) -> Config:
    """The configuration that `saved_form` wrote, and *path* holds.

    Raises:
        ConfigError: another release wrote it.
    """
    try:
        return msgspec.json.decode(data, type=Config)
    except msgspec.DecodeError as exc:
        msg = f"{path} is not of this release: {exc}"
        raise ConfigError(msg, subject=path, hint="mount again") from exc


def _with_limit(room: RoomSection, spool_max: str) -> RoomSection:
    try:
        return RoomSection(
            free_min_share=room.free_min_share,
            free_target_share=room.free_target_share,
            spool_max=spool_max,
            wait_s=room.wait_s,
        )
    except ValueError as exc:
        msg = f"--spool-max: {exc}"
        raise UsageError(msg, subject=spool_max, hint="ckptgate mount --spool-max 500GiB") from exc


def _check_apart(**paths: str) -> None:
    """No two of the three places may contain one another."""
    for name, path in paths.items():
        for other_name, other in paths.items():
            if name != other_name and (path + "/").startswith(other.rstrip("/") + "/"):
                msg = f"the {name} {path} lies in the {other_name} {other}"
                raise UsageError(msg, subject=path, hint="use three separate directories")
