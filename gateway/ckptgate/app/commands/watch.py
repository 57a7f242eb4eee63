"""The live view of `status --watch`: one screen, what is under way first.

Names and messages are others' words: they are shown as text, never read as markup.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckptgate.app.asking import ask
from ckptgate.app.commands.output import (
    finishing_words,
    human_bytes,
    human_seconds,
    printable,
)
from ckptgate.app.registry import MountInfo
from ckptgate.errors import CkptError, ExitCode

__all__ = ["attempts_table", "mount_view", "watch_status"]

_REFRESH_S: Final = 0.5
_RANKS_SHOWN: Final = 8
_DONE_SHOWN: Final = 5
_INCIDENTS_SHOWN: Final = 4
_COLOURS: Final = {
    "open": "yellow",
    "sealed": "cyan",
    "committed": "green",
    "aborted": "red",
    "abandoned": "magenta",
    "replaced": "dim",
}
_SEVERITIES: Final = {"critical": "bold red", "warning": "yellow", "notice": "dim"}
_COLUMNS: Final = (
    "checkpoint",
    "state",
    "staged",
    "digested",
    "in the store",
    "voted",
    "pace",
    "owed",
)


def _text(words: str, style: str = "") -> Text:
    """Others' words: no markup, and nothing that a terminal obeys."""
    return Text(printable(words), style)


def attempts_table(title: str, report: dict[str, Any]) -> Table:
    """One mount's attempts as a table: those under way first, each with its ranks."""
    table = Table(title=_text(title), title_justify="left", expand=True)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    rows = list(reversed(report.get("attempts", [])))
    under_way = [row for row in rows if row["state"] in {"open", "sealed"}]
    done = [row for row in rows if row["state"] not in {"open", "sealed"}][:_DONE_SHOWN]
    for row in (*under_way, *done):
        table.add_row(*_attempt(row))
        for cells in _ranks(row):
            table.add_row(*cells, style="dim")
    return table


def _attempt(row: dict[str, Any]) -> Iterator[Text]:
    yield _text(f"{row['run']}/{row['name']}".lstrip("/"))
    yield _text("hidden" if row["is_hidden"] else row["state"], _COLOURS.get(row["state"], ""))
    files = row["files"]
    yield _text(f"{human_bytes(row['size_bytes'])}, {sum(files.values())} files")
    yield _text(human_bytes(row["digested_bytes"]))
    yield _text(_share(row["stored_bytes"], row["size_bytes"]))
    voted = sum(member["voted"] for member in row["members"])
    nodes = f" ({voted} of {len(row['members'])} nodes)" if row["members"] else ""
    yield _text(f"{'yes' if row['is_voted'] else ''}{nodes}".strip())
    yield _text(_pace(row))
    yield _text(row["reason"] or "; ".join(row["missing"][:3]))


def _ranks(row: dict[str, Any]) -> Iterator[tuple[Text, ...]]:
    ranks = row["ranks"]
    for it in ranks[:_RANKS_SHOWN] if len(ranks) > 1 else ():
        yield (
            _text("  rank ?" if it["rank"] < 0 else f"  rank {it['rank']}"),
            _text("committed" if it["committed"] else ""),
            _text(human_bytes(it["staged_bytes"])),
            _text(human_bytes(it["digested_bytes"])),
            _text(_share(it["stored_bytes"], it["staged_bytes"])),
            _text("yes" if it["voted"] else ""),
        )
    if len(ranks) > _RANKS_SHOWN:
        yield (_text(f"  and {len(ranks) - _RANKS_SHOWN} more ranks"),)


def _share(done: int, total: int) -> str:
    percent = f" ({100 * done // total} %)" if total else ""
    return f"{human_bytes(done)}{percent}"


def _pace(row: dict[str, Any]) -> str:
    if row["phases"] and "commit" in row["phases"]:
        return f"took {human_seconds(sum(row['phases'].values()))}"
    if not row["rate_bytes_s"] or row["stored_bytes"] >= row["size_bytes"]:
        return ""
    return f"{human_bytes(row['rate_bytes_s'])}/s, {human_seconds(row['eta_s'])} left"


def _line(report: dict[str, Any]) -> Text:
    """The mount as a whole."""
    room, disk, contact = report["room"], report["disk"], report["contact"]
    used = f"spool {human_bytes(room['used'])} of {human_bytes(room['limit'])}, "
    line = _text(used if room["limit"] else "spool's ")
    line.append(f"disk {human_bytes(disk['free'])} free of {human_bytes(disk['total'])}")
    if words := finishing_words(report):
        line.append_text(_text(f"  {words}", "bold yellow"))
    if room["is_full"]:
        line.append("  spool is full", "bold red")
    if not contact["is_reached"]:
        line.append_text(_text(f"  store does not answer: {contact['error']}", "bold red"))
    for run in report["runs"]:
        newest = run["last_committed"] or "nothing committed"
        line.append("\n")
        said = f"{run['run'] or '/'}: newest {newest}, {run['committed']} committed"
        line.append_text(_text(said))
        if run["in_doubt"]:
            line.append("  last record in doubt", "bold red")
    return line


def _incidents(report: dict[str, Any]) -> Iterator[Text]:
    graves = [event for event in report["events"] if event["severity"] != "notice"]
    for event in graves[-_INCIDENTS_SHOWN:]:
        style = _SEVERITIES.get(event["severity"], "")
        line = _text(f"{event['at']} {event['kind']} ", style)
        line.append_text(_text(f"{event['subject']}: {event['detail']}", "default"))
        if event["hint"]:
            line.append(f"\n  -> {event['hint']}", "cyan")
        yield line


def mount_view(title: str, report: dict[str, Any]) -> RenderableType:
    """One mount's part of the screen."""
    return Group(attempts_table(title, report), _line(report), *_incidents(report))


def _view(mounts: Sequence[tuple[MountInfo, str]]) -> RenderableType:
    views: list[RenderableType] = []
    for mount, below in mounts:
        title = f"{mount.place} -> {mount.store}"
        try:
            views.append(mount_view(title, ask(mount, {"op": "status", "path": below})))
        except CkptError as exc:
            views.append(_text(f"{title}: {exc.message}", style="red"))
    return Group(*views) if views else _text("no ckptgate mount runs here")


def watch_status(mounts: Sequence[tuple[MountInfo, str]]) -> int:
    """Show the mounts until interrupted."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_view(mounts), console=Console(), auto_refresh=False) as live,
    ):
        while True:
            time.sleep(_REFRESH_S)
            live.update(_view(mounts), refresh=True)
    return ExitCode.OK
