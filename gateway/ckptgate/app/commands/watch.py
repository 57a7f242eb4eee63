"""The live view of `status --watch`: attempts, their files' progress, who owes what."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckptgate.app.asking import ask
from ckptgate.app.commands.output import human_bytes
from ckptgate.app.registry import MountInfo
from ckptgate.errors import CkptError, ExitCode

__all__ = ["attempts_table", "watch_status"]

_REFRESH_S = 0.25
_COLOURS = {
    "open": "yellow",
    "sealed": "cyan",
    "committed": "green",
    "aborted": "red",
    "abandoned": "magenta",
    "replaced": "dim",
}


def attempts_table(title: str, report: dict[str, Any]) -> Table:
    """One mount's attempts as a table."""
    table = Table(title=title, title_justify="left", expand=True)
    for column in ("checkpoint", "state", "staged", "digested", "in the store", "owed"):
        table.add_column(column, overflow="fold")
    for row in report.get("attempts", []):
        files = row["files"]
        stored = files["stored"]
        digested = stored + files["digested"]
        staged = digested + files["quiet"] + files["open"]
        size = human_bytes(row["size_bytes"])
        state = Text(row["state"], style=_COLOURS.get(row["state"], ""))
        owed = row["reason"] or "; ".join(row["missing"][:3])
        name = f"{row['run']}/{row['name']}".lstrip("/")
        table.add_row(name, state, f"{staged} ({size})", str(digested), str(stored), owed)
    return table


def _view(mounts: Sequence[MountInfo]) -> RenderableType:
    tables: list[RenderableType] = []
    for mount in mounts:
        title = f"{mount.mountpoint} -> {mount.store}"
        try:
            tables.append(attempts_table(title, ask(mount, {"op": "status"})))
        except CkptError as exc:
            tables.append(Text(f"{title}: {exc.message}", style="red"))
    return Group(*tables) if tables else Text("no ckptgate mount runs here")


def watch_status(mounts: Sequence[MountInfo]) -> int:
    """Show the mounts until interrupted."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_view(mounts), console=Console(), auto_refresh=False) as live,
    ):
        while True:
            time.sleep(_REFRESH_S)
            live.update(_view(mounts), refresh=True)
    return ExitCode.OK
