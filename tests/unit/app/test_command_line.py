"""The command line imports what the command needs: scripts call it often."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys

import pytest

from ckptgate.app.cli import COMMANDS, main

ENGINES = (
    "ckptgate.vfs.vfs", "ckptgate.engine.publisher", "ckptgate_adapters.fuse.server",
    "ckptgate_adapters.sqlite_spool.spool", "s3fs", "rich",
)  # fmt: skip
"""What only a daemon, or a command without one, works with."""


@pytest.mark.parametrize("module", COMMANDS)
def test_each_module_adds_the_commands_that_the_table_tells(module: str) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"ckptgate.app.commands.{module}").add_commands(commands)
    assert tuple(commands.choices) == COMMANDS[module]


@pytest.mark.parametrize("command", ["wait", "commit", "status", "ls", "umount", "drain", "pin"])
def test_a_command_that_asks_a_daemon_imports_no_engine(command: str) -> None:
    script = (
        "import contextlib, sys\n"
        "from ckptgate.app.cli import main\n"
        f"with contextlib.suppress(SystemExit): main([{command!r}, '--help'])\n"
        f"print([name for name in {ENGINES!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["--help"], ["unheard-of"], []])
def test_without_a_command_of_ours_all_are_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    said = "".join(capsys.readouterr())
    if words:
        assert all(word in said for names in COMMANDS.values() for word in names)
    else:
        assert "COMMAND" in said
