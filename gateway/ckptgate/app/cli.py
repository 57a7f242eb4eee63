"""The command line: parse, call one function, print. Exit codes are in `errors.ExitCode`.

`ckptgate --help` and README list the commands; tests call `main(argv)`. Only the module of the
command that is run is imported: scripts call commands often, and importing all takes half a second.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Final

from ckptgate.app.commands.output import print_json
from ckptgate.errors import CkptError, ExitCode
from ckptgate_adapters.channels import error_reply

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS: Final = {
    "mounting": ("mount", "umount", "drain"),
    "serving": ("serve",),
    "status": ("status",),
    "look": ("ls", "show", "log", "verify"),
    "decide": ("commit", "abort", "wait"),
    "keep": ("gc", "pin", "unpin"),
    "outside": ("export", "uploads"),
    "running": ("exec", "demo"),
    "service": ("service",),
}
"""The modules of `ckptgate.app.commands`, in the order of the help, and what each adds."""


class _Parser(argparse.ArgumentParser):
    """Ends with our usage code: argparse's own 2 means `pending` here."""

    def error(self, message: str) -> None:  # type: ignore[override]  # it does not return
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """The command line.

    Args:
        command: the only one that will be parsed; if it is none of ours, all are there.
    """
    from ckptgate import __version__  # noqa: PLC0415 - the package imports this module's package

    parser = _Parser(
        prog="ckptgate",
        description="Transactional checkpoint gateway: what can be seen is whole.",
        epilog="Exit codes: 0 done, 1 internal error, 2 pending, 3 refused or aborted, "
        "4 not found, 5 integrity, 6 store/spool/mount unusable, 7 busy, 64 usage.",
    )
    parser.add_argument("--version", action="version", version=f"ckptgate {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = [module for module, words in COMMANDS.items() if command in words]
    for module in wanted or COMMANDS:
        importlib.import_module(f"ckptgate.app.commands.{module}").add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(words[0] if words else "").parse_args(words)
    logging.basicConfig(format="ckptgate: %(message)s", level=logging.WARNING)
    try:
        return int(args.handler(args))
    except CkptError as exc:
        if getattr(args, "json", False):
            print_json({"error": error_reply(exc)})
        print(f"ckptgate: {exc.message}", file=sys.stderr)
        if exc.hint:
            print(f"  hint: {exc.hint}", file=sys.stderr)
        return exc.exit_code
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return ExitCode.OK
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 - outer edge: a bug ends with its traceback and exit code 1
        traceback.print_exc()
        return ExitCode.INTERNAL


if __name__ == "__main__":
    sys.exit(main())
