"""`service install`, `service uninstall`: a mount as a systemd service."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

from ckptgate.app.config import load_config_file, parse_config
from ckptgate.app.service_files import (
    CONFIG_DIRECTORY,
    Service,
    check_name,
    check_program,
    config_path,
    example_config,
    is_as_written,
    own_program,
    service_files,
    shared_files,
    unit_name,
)
from ckptgate.errors import BusyError, ConfigError, ExitCode, UnusableError
from ckptgate_adapters.systemd.places import Done, FileToPlace, Step, inside, place, take_away

__all__ = ["add_commands"]

_RUNNING: Final = "/run/systemd/system"
"""Is there exactly where systemd is the machine's service manager (sd_booted(3))."""
_TIMEOUT_S: Final = 60.0
_ACTIVE: Final = frozenset({"active", "activating", "deactivating", "reloading"})


def add_commands(commands: Any) -> None:
    """Add this module's commands."""
    service = commands.add_parser("service", help="install a mount as a systemd service")
    actions = service.add_subparsers(dest="action", required=True, metavar="install|uninstall")
    install = actions.add_parser(
        "install", help="put the unit, its files and a configuration in place"
    )
    _add_common(install)
    install.add_argument("--store", default="", help="of a new configuration")
    install.add_argument("--mountpoint", default="", metavar="DIR", help="likewise")
    install.add_argument("--spool", default="", metavar="DIR", help="likewise")
    install.add_argument(
        "--exec", dest="program", default="", metavar="PATH", help="the ckptgate that it runs"
    )
    install.set_defaults(handler=_install)
    uninstall = actions.add_parser("uninstall", help="remove them; the spool stays")
    _add_common(uninstall)
    uninstall.set_defaults(handler=_uninstall, program="", store="", mountpoint="", spool="")


def _add_common(parser: Any) -> None:
    parser.add_argument("name", metavar="NAME", help="of the service ckptgate@NAME")
    parser.add_argument("--root", default="", metavar="DIR", help="root directory of an image")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _install(args: argparse.Namespace) -> int:
    root = os.path.abspath(args.root) if args.root else ""
    service = _service(args, root)
    files = [*shared_files(service.program, sbin=_sbin(root)), *service_files(service)]
    _all(files, lambda file: place(file, root=root, is_dry=args.dry_run), "install")
    _warn_of_places(service)
    unit = unit_name(service.name)
    if not root:
        _tell_manager(["systemd-sysusers", "/etc/sysusers.d/ckptgate.conf"], is_dry=args.dry_run)
        _tell_manager(
            ["systemd-tmpfiles", "--create", "/etc/tmpfiles.d/ckptgate.conf"], is_dry=args.dry_run
        )
        _tell_manager(["systemctl", "daemon-reload"], is_dry=args.dry_run)
    where = f"systemctl --root={root} enable {unit}" if root else f"systemctl enable --now {unit}"
    print(f"next: see to {config_path(service.name)}, then {where}")
    _tell_dry(args)
    return ExitCode.OK


def _uninstall(args: argparse.Namespace) -> int:
    root = os.path.abspath(args.root) if args.root else ""
    service = _service(args, root)
    unit = unit_name(service.name)
    if not root and _is_active(unit):
        msg = f"{unit} is running"
        raise BusyError(msg, subject=unit, hint=f"systemctl disable --now {unit}")
    if not root:
        _tell_manager(["systemctl", "disable", unit], is_dry=args.dry_run)
    files = service_files(service)
    others = _others(root, service.name)
    if others:
        print(f"kept      what {', '.join(others)} needs, too")
    else:
        files += shared_files(service.program, sbin=_sbin(root))
    _all(files, lambda file: take_away(file, root=root, is_dry=args.dry_run), "uninstall")
    if not root:
        _tell_manager(["systemctl", "daemon-reload"], is_dry=args.dry_run)
    if service.config is not None and service.config.spool:
        print(
            f"kept      {service.config.spool} (the spool: what is staged in it is never removed)"
        )
    _tell_dry(args)
    return ExitCode.OK


def _tell_dry(args: argparse.Namespace) -> None:
    if args.dry_run:
        print("dry run: nothing of this was done")


def _service(args: argparse.Namespace, root: str) -> Service:
    """What the arguments and a present configuration say.

    Raises:
        UsageError, ConfigError: a name, place or the configuration is wrong.
    """
    name = check_name(args.name)
    program = check_program(args.program) if args.program else own_program()
    text = example_config(name, store=args.store, mountpoint=args.mountpoint, spool=args.spool)
    config = parse_config(text, config_path(name))
    present = inside(root, config_path(name))
    if os.path.exists(present):
        try:
            config = load_config_file(present)
            if args.action == "uninstall":
                text = _as_written(present) or text
        except ConfigError as exc:
            if args.action == "install":
                raise
            print(f"ckptgate: {exc.message}", file=sys.stderr)
    return Service(name=name, program=program, config=config, config_text=text)


def _as_written(path: str) -> str:
    """The text of a configuration that `install` wrote, "" if it was changed since."""
    with open(path, encoding="utf-8", errors="surrogateescape") as stream:
        text = stream.read()
    return text if is_as_written(text) else ""


def _others(root: str, name: str) -> list[str]:
    """Other services that have a configuration."""
    try:
        found = os.listdir(inside(root, CONFIG_DIRECTORY))
    except FileNotFoundError:
        return []
    names = (entry.removesuffix(".toml") for entry in found if entry.endswith(".toml"))
    return sorted(unit_name(other) for other in names if other != name)


def _sbin(root: str) -> str:
    """Where mount(8) finds its helpers: /sbin, by its real name where that is a link."""
    return "/usr/sbin" if os.path.islink((root or "") + "/sbin") else "/sbin"


def _all(files: list[FileToPlace], act: Callable[[FileToPlace], Step], what: str) -> None:
    for file in files:
        try:
            step = act(file)
        except OSError as exc:
            msg = f"cannot {what} {file.path}: {exc.strerror or exc}"
            hint = "" if os.geteuid() == 0 else "as root, or --root DIR"
            raise UnusableError(msg, subject=file.path, hint=hint) from exc
        if step.done is not Done.ABSENT:
            print(f"{step.done:<9} {step.path}" + (f" ({step.why})" if step.why else ""))


def _warn_of_places(service: Service) -> None:
    config = service.config
    if config is None:
        return
    where = config_path(service.name)
    for key in ("store", "mountpoint"):
        if not getattr(config, key):
            print(
                f"ckptgate: warning: {where} has no {key}: the service will not start",
                file=sys.stderr,
            )


def _is_active(unit: str) -> bool:
    if not os.path.isdir(_RUNNING) or shutil.which("systemctl") is None:
        return False
    done = subprocess.run(
        ["systemctl", "is-active", unit],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.stdout.strip() in _ACTIVE


def _tell_manager(words: list[str], *, is_dry: bool) -> None:
    """Run one of systemd's own commands, where it is the service manager."""
    line = " ".join(words)
    if not os.path.isdir(_RUNNING) or shutil.which(words[0]) is None:
        print(f"left out  {line} (systemd is not running here)")
        return
    if not is_dry:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            msg = f"{line} ended with {done.returncode}: {done.stderr.strip()}"
            raise UnusableError(msg, subject=words[0], hint="see its message; then install again")
    print(f"ran       {line}")
