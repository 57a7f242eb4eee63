"""Which files make a service of a configuration, and where each one belongs.

Owns the rules what a service may be called, and that the unit runs the very ckptgate that installed
it. How files get into place is `ckptgate_adapters.systemd.places`. One thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from typing import Final

from ckptgate.app.addresses import is_url, store_address
from ckptgate.app.config import ConfigFile
from ckptgate.errors import UnusableError, UsageError
from ckptgate_adapters.systemd.places import FileToPlace, read_template

__all__ = [
    "CONFIG_DIRECTORY",
    "Service",
    "check_name",
    "config_path",
    "example_config",
    "is_as_written",
    "service_files",
    "shared_files",
    "unit_name",
]

CONFIG_DIRECTORY: Final = "/etc/ckptgate"
_UNITS: Final = "/etc/systemd/system"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""It is part of paths and of a unit's name, and needs no escape in either."""
_PACKAGED: Final = "/usr/bin/ckptgate"
_HELPER: Final = "mount.ckptgate"
_SPECIAL: Final = re.compile(r"[\s\"'\\%$;]")
"""What means something else in a unit's command line."""
_STAMP: Final = "# `ckptgate service uninstall` removes this file as long as it is as written: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One instance of the unit.

    Attributes:
        name: NAME of `ckptgate@NAME.service`.
        program: the `ckptgate` that it runs, absolute.
        config: what its configuration says, None if that doesn't load.
        config_text: of a new configuration.
    """

    name: str
    program: str
    config: ConfigFile | None
    config_text: str


def check_name(name: str) -> str:
    """The name of a service, if it can be one.

    Raises:
        UsageError: it can't.
    """
    if not _NAME.fullmatch(name):
        msg = f"a service's name is a letter or digit, then up to 63 of these and _ . -: {name!r}"
        raise UsageError(msg, subject=name, hint="ckptgate service install nightly")
    return name


def unit_name(name: str) -> str:
    """The unit of a service."""
    return f"ckptgate@{name}.service"


def config_path(name: str) -> str:
    """The configuration of a service."""
    return f"{CONFIG_DIRECTORY}/{name}.toml"


def own_program() -> str:
    """The `ckptgate` of this installation.

    Raises:
        UnusableError: it has none beside its Python.
    """
    # Not resolved: an environment's Python is a link, and stands for its packages only as that.
    path = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "ckptgate")
    if not os.path.exists(path):
        msg = f"no ckptgate is beside {sys.executable}"
        raise UnusableError(msg, subject=path, hint="pip install ckptgate, or name it by --exec")
    return path


def check_program(path: str) -> str:
    """A program that a unit can run.

    Raises:
        UsageError: its path isn't absolute, or has characters that mean something in a unit.
    """
    if not path.startswith("/") or _SPECIAL.search(path):
        msg = f"the program must be an absolute path without blanks and quotes: {path!r}"
        raise UsageError(msg, subject=path, hint="--exec /opt/ckptgate/bin/ckptgate")
    return path


def example_config(name: str, *, store: str, mountpoint: str, spool: str) -> str:
    """The text of a new configuration; what isn't said is the example's.

    Raises:
        UsageError: a place isn't one.
    """
    text = read_template("example.toml").replace(
        "/var/lib/ckptgate/NAME", f"/var/lib/ckptgate/{name}"
    )
    text = text.replace("NAME.toml", f"{name}.toml").replace("NAME.env", f"{name}.env")
    if store:
        text = _with_value(text, "store", store_address(store))
    if mountpoint:
        text = _with_value(text, "mountpoint", os.path.abspath(mountpoint))
    if spool:
        text = _with_value(text, "spool", os.path.abspath(spool))
    return f"{text}{_STAMP}{_digest(text)}\n"


def is_as_written(text: str) -> bool:
    """Whether nobody changed the text of a configuration since `example_config` made it."""
    body, mark, digest = text.rpartition(_STAMP)
    return bool(mark) and digest == _digest(body) + "\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _with_value(text: str, key: str, value: str) -> str:
    if any(ord(mark) < 32 or mark in '"\\' for mark in value):
        msg = f"{key} has characters that are no part of a path: {value!r}"
        raise UsageError(msg, subject=value)
    lines = [
        f'{key} = "{value}"' if line.startswith(f"{key} = ") else line for line in text.splitlines()
    ]
    return "\n".join(lines) + "\n"


def service_files(service: Service) -> list[FileToPlace]:
    """What belongs to one service alone."""
    files = [
        FileToPlace(
            path=config_path(service.name),
            content=service.config_text,
            mode=0o640,
            is_theirs=True,
        )
    ]
    places = _places(service.config)
    if places:
        files.append(
            FileToPlace(
                path=f"{_UNITS}/{unit_name(service.name)}.d/10-places.conf",
                content=_drop_in(service.name, places),
            )
        )
    return files


def _places(config: ConfigFile | None) -> list[str]:
    """Directories whose file systems must be mounted before: an empty one below is no store."""
    if config is None:
        return []
    found = [config.spool] if config.spool else []
    if config.store and not is_url(config.store):
        found.append(store_address(config.store))
    if config.mountpoint:
        # What it lies on; the mount itself is not to be there yet.
        found.append(os.path.dirname(os.path.abspath(config.mountpoint)))
    return [path for path in dict.fromkeys(found) if path.startswith("/")]


def _drop_in(name: str, places: list[str]) -> str:
    lines = "".join(f"RequiresMountsFor={_quoted(path)}\n" for path in places)
    return f"# Of {config_path(name)}, by `ckptgate service install {name}`.\n[Unit]\n{lines}"


def _quoted(path: str) -> str:
    """A path in a unit's list of words."""
    text = path.replace("%", "%%")
    if not _SPECIAL.search(path):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def shared_files(program: str, *, sbin: str) -> list[FileToPlace]:
    """What all services share.

    Args:
        program: the `ckptgate` that they run.
        sbin: the directory in which mount(8) looks for its helpers.
    """
    unit = read_template("ckptgate@.service").replace(_PACKAGED, program)
    helper = os.path.join(os.path.dirname(program), _HELPER)
    return [
        FileToPlace(path=f"{_UNITS}/ckptgate@.service", content=unit),
        FileToPlace(
            path="/etc/tmpfiles.d/ckptgate.conf", content=read_template("ckptgate.tmpfiles.conf")
        ),
        FileToPlace(
            path="/etc/sysusers.d/ckptgate.conf", content=read_template("ckptgate.sysusers.conf")
        ),
        FileToPlace(path=f"{sbin}/{_HELPER}", content=helper, is_link=True),
    ]
