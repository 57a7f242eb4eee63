"""Configuration: a TOML file and the command line become one frozen, strict value.

Only this module and the command line read files and environment for settings; everything below gets
values. An unknown key or a wrong value is a ConfigError that names its place.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from ckptgate.app.units import parse_bytes, parse_seconds
from ckptgate.errors import ConfigError, UsageError
from ckptgate.model.kinds import DEFAULT_PATTERNS, NamePatterns

__all__ = [
    "SYSTEM_DIRECTORY",
    "CommitSection",
    "Config",
    "ConfigFile",
    "NamesSection",
    "ReclaimSection",
    "RoomSection",
    "default_spool",
    "load_config_file",
    "make_config",
    "runtime_directory",
    "state_directory",
    "store_path",
]

MAX_CONFIG_BYTES: Final = 1 << 20
SPOOL_BYTES_MIN: Final = 1 << 20
_LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
SYSTEM_DIRECTORY: Final = "/run/ckptgate"
"""Where root's running mounts are listed, for everybody to see."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: unknown keys are errors."""


class CommitSection(_Strict, frozen=True, kw_only=True):
    """`[commit]`: how long things may take. All in seconds.

    Attributes:
        deadline_s: from the SEAL to the ABORT of what isn't whole.
        quiescence_s: without a write, before an attempt without a commit event may be sealed.
        abandon_after_s: without a live writer and without a SEAL, until an attempt is given up.
        survivor_delay_s: until other nodes finish what a silent node left undecided.
        live_interval_s: between copies of a live file that grows.
        idle_interval_s: between looks at the log when nothing is under way.
        resume_wait_s: at most, a new job waits for sealed attempts that can still commit.
        decision_wait_s: at most, a write into an attempt that is being decided waits.
    """

    deadline_s: float = 600.0
    quiescence_s: float = 30.0
    abandon_after_s: float = 900.0
    survivor_delay_s: float = 5.0
    live_interval_s: float = 2.0
    idle_interval_s: float = 2.0
    resume_wait_s: float = 60.0
    decision_wait_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                msg = f"commit.{name} is negative"
                raise ValueError(msg)


class NamesSection(_Strict, frozen=True, kw_only=True):
    """`[names]`: shell patterns of names with a meaning; each replaces the default list."""

    checkpoints: tuple[str, ...] = DEFAULT_PATTERNS.checkpoints
    temporaries: tuple[str, ...] = DEFAULT_PATTERNS.temporaries
    pointers: tuple[str, ...] = DEFAULT_PATTERNS.pointers
    whole_suffixes: tuple[str, ...] = DEFAULT_PATTERNS.whole_suffixes

    def patterns(self) -> NamePatterns:
        """As the model wants them."""
        return NamePatterns(
            checkpoints=self.checkpoints,
            temporaries=self.temporaries,
            pointers=self.pointers,
            whole_suffixes=self.whole_suffixes,
        )


class RoomSection(_Strict, frozen=True, kw_only=True):
    """`[room]`: how full the spool's disk may get, as shares of it that are free.

    Attributes:
        free_min_share: below it, local copies of published checkpoints are given up; 0 for never.
        free_target_share: until so much is free again.
        spool_max: how much the spool itself may take (`500GiB`), "" for as much as there is: above
            it the same copies are given up, and where none is left new files are refused.
    """

    free_min_share: float = 0.25
    free_target_share: float = 0.4
    spool_max: str = ""

    @property
    def spool_max_bytes(self) -> int:
        """Bytes, 0 for no limit."""
        return parse_bytes(self.spool_max) if self.spool_max else 0

    def __post_init__(self) -> None:
        if self.spool_max and self.spool_max_bytes < SPOOL_BYTES_MIN:
            msg = f"room.spool_max is less than {SPOOL_BYTES_MIN} bytes"
            raise ValueError(msg)
        for name in ("free_min_share", "free_target_share"):
            if not 0 <= getattr(self, name) < 1:
                msg = f"room.{name} is not in 0 <= x < 1"
                raise ValueError(msg)
        if self.free_min_share > self.free_target_share:
            msg = "room.free_min_share is more than room.free_target_share"
            raise ValueError(msg)


class ReclaimSection(_Strict, frozen=True, kw_only=True):
    """`[reclaim]`: how long what is dead is kept, as durations (`24h`, `7d`, `forever`).

    Attributes:
        grace: what is replaced, deleted, aborted, or was never finished.
        keep_aborted: in the spool, the files of what was aborted or abandoned; at least the grace.
        lost_after: an attempt that nobody sealed and that nothing comes to any more is aborted.
    """

    grace: str = "24h"
    keep_aborted: str = "7d"
    lost_after: str = "7d"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            try:
                parse_seconds(getattr(self, name))
            except ValueError as exc:
                msg = f"reclaim.{name}: {exc}"
                raise ValueError(msg) from exc


class ConfigFile(_Strict, frozen=True, kw_only=True):
    """What the file of `--config` may hold; the command line wins over it.

    Attributes:
        store: directory or `file:///` URL.
        spool: local directory for staging.
        job: job key for callers of whom nothing can be read, "" for none (`run:<id>`).
        passthrough: let the kernel read and write staged files itself where it can.
        verify: `size` or `readback`; "" chooses by the store's file system.
        log_level: of the daemon.
        commit, names, room, reclaim: see there.
    """

    store: str = ""
    spool: str = ""
    job: str = ""
    passthrough: bool = True
    verify: str = ""
    log_level: str = "INFO"
    commit: CommitSection = CommitSection()
    names: NamesSection = NamesSection()
    room: RoomSection = RoomSection()
    reclaim: ReclaimSection = ReclaimSection()


_SECTIONS: Final[dict[str, type[_Strict]]] = {
    "commit": CommitSection,
    "names": NamesSection,
    "room": RoomSection,
    "reclaim": ReclaimSection,
}


class Config(ConfigFile, frozen=True, kw_only=True):
    """All that a mount needs to know; paths are absolute."""

    mountpoint: str


def load_config_file(path: str) -> ConfigFile:
    """Read and check a TOML file.

    Raises:
        ConfigError: it can't be read, isn't TOML, or has an unknown key or wrong value.
    """
    try:
        with open(path, "rb") as stream:
            data = tomllib.loads(stream.read(MAX_CONFIG_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
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


def store_path(store: str) -> str:
    """The absolute directory that a STORE argument names.

    Raises:
        UsageError: it is a URL of a kind that this version doesn't serve.
    """
    if "://" not in store:
        return os.path.realpath(os.path.expanduser(store))
    parts = urlsplit(store)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"}:
        msg = f"store {store!r} is not a directory or a file:/// URL"
        raise UsageError(msg, subject=store, hint="ckptgate mount DIRECTORY MOUNTPOINT")
    return os.path.realpath(unquote(parts.path))


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
    """The spool of this pair of store and mount point: the same at every start."""
    identity = f"{store}\0{mountpoint}".encode()
    return os.path.join(state_directory(), "spool-" + hashlib.sha256(identity).hexdigest()[:16])


def make_config(
    file: ConfigFile, *, store: str, mountpoint: str, spool: str, spool_max: str = ""
) -> Config:
    """The whole configuration; arguments that aren't "" win over the file.

    Raises:
        UsageError, ConfigError: something is missing or contradicts something else.
    """
    chosen = store or file.store
    if not chosen:
        msg = "no store is given"
        raise UsageError(msg, hint="ckptgate mount STORE MOUNTPOINT, or `store` in the file")
    root = store_path(chosen)
    where = os.path.abspath(mountpoint)
    staged = spool or file.spool or default_spool(root, where)
    if "://" in staged:
        msg = f"spool {staged!r} is not a local directory"
        raise UsageError(msg, subject=staged)
    staged = os.path.realpath(os.path.expanduser(staged))
    _check_apart(store=root, mountpoint=where, spool=staged)
    if file.log_level not in _LOG_LEVELS:
        msg = f"log_level is {file.log_level!r}, not one of {', '.join(_LOG_LEVELS)}"
        raise ConfigError(msg, subject="log_level")
    if file.verify not in {"", "size", "readback"}:
        msg = f"verify is {file.verify!r}, not 'size' or 'readback'"
        raise ConfigError(msg, subject="verify")
    values = {name: getattr(file, name) for name in ConfigFile.__struct_fields__}
    values.update(store=root, spool=staged, mountpoint=where)
    if spool_max:
        values["room"] = _with_limit(file.room, spool_max)
    return Config(**values)


def _with_limit(room: RoomSection, spool_max: str) -> RoomSection:
    try:
        return RoomSection(
            free_min_share=room.free_min_share,
            free_target_share=room.free_target_share,
            spool_max=spool_max,
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
