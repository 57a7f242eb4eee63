"""The demo's three acts, each with its checks; returns 0 only if every check held.

Act 1: four ranks on two nodes save; a reader sees nothing until the last one has committed, then
all of it. Act 2: a rank is killed in the next save; `latest` stays. Act 3: the job is started again
and saves; `latest` moves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import blake3
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ckptgate.app.commands.watch import attempts_table
from ckptgate.app.demo.stage import NODES, RUN, WORLD_SIZE, Stage
from ckptgate.app.demo.trainer import SHARDS, shard_name
from ckptgate.errors import CkptError

__all__ = ["play"]

_MIB: Final = 8
_PAUSE_S: Final = 0.03
_LATE_S: Final = 2.0
_TIMEOUT_S: Final = 40.0
_FRAME_S: Final = 0.1


class _Play:
    """Shows, waits and checks. One thread."""

    def __init__(self, stage: Stage, console: Console, *, is_plain: bool) -> None:
        self._stage = stage
        self._console = console
        self._is_plain = is_plain
        self._live: Live | None = None
        self._line = ""
        self.failures: list[str] = []

    # What is shown

    def say(self, text: str) -> None:
        """A line of the story."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def check(self, text: str, holds: bool) -> None:
        """A checked fact."""
        mark = "[green]ok[/]" if holds else "[red]FAILED[/]"
        self.say(f"  {mark}  {text}")
        if not holds:
            self.failures.append(text)

    def frame(self) -> RenderableType:
        """The live view of both nodes and of what a reader sees."""
        parts: list[RenderableType] = [
            attempts_table(f"node {node + 1}", self._stage.report(node)) for node in range(NODES)
        ]
        seen = self.visible()
        parts.append(Text(f"a reader on node 2 sees: {', '.join(seen) or 'nothing'}", "bold"))
        return Group(*parts)

    def wait(self, what: str, is_done: Callable[[], bool]) -> bool:
        """Show the view until *is_done*; False after the time limit."""
        deadline = time.monotonic() + _TIMEOUT_S
        if self._is_plain:
            return self._wait_plain(what, is_done, deadline)
        with Live(self.frame(), console=self._console, auto_refresh=False, transient=True) as live:
            while not (done := is_done()) and time.monotonic() < deadline:
                live.update(self.frame(), refresh=True)
                time.sleep(_FRAME_S)
            self._console.print(self.frame())
        if not done:
            self.check(f"{what} within {_TIMEOUT_S:g} s", holds=False)
        return done

    def _wait_plain(self, what: str, is_done: Callable[[], bool], deadline: float) -> bool:
        while not (done := is_done()) and time.monotonic() < deadline:
            self._print_progress()
            time.sleep(_FRAME_S)
        self._print_progress()
        if not done:
            self.check(f"{what} within {_TIMEOUT_S:g} s", holds=False)
        return done

    def _print_progress(self) -> None:
        words: list[str] = []
        for node in range(NODES):
            for row in self._stage.report(node).get("attempts", []):
                if row["state"] not in {"open", "sealed"}:
                    continue
                counts = " ".join(f"{state}={n}" for state, n in row["files"].items() if n)
                words.append(f"node{node + 1} {row['name']} {row['state']} {counts}")
        line = "; ".join([*words, f"reader sees {', '.join(self.visible()) or 'nothing'}"])
        if line != self._line:
            self._line = line
            self.say(f"      [dim]{line}[/]")

    # What a reader sees: this process belongs to no job

    def visible(self) -> list[str]:
        """Names that a reader finds in the run, through the second node's mount."""
        try:
            return sorted(os.listdir(os.path.join(self._stage.mounts[1], RUN)))
        except OSError:
            return []

    def raw(self) -> list[str]:
        """Names in the run's directory of the store itself."""
        try:
            names = os.listdir(os.path.join(self._stage.store, RUN))
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name != ".ckptgate")

    def latest(self) -> str:
        """The target of `latest` in the store, "" if there is none."""
        try:
            return os.readlink(os.path.join(self._stage.store, RUN, "latest"))
        except FileNotFoundError:
            return ""

    # The acts

    def save(self, name: str) -> list[subprocess.Popen[str]]:
        """Start the save of all ranks but the last."""
        return [
            self._stage.start_rank(name, rank, mib=_MIB, pause_s=_PAUSE_S)
            for rank in range(WORLD_SIZE - 1)
        ]

    def act_one(self) -> None:
        """A reader sees nothing until the last rank has committed."""
        self.say("\n[bold]1. Four ranks on two nodes save step-1; the last one is late.[/]")
        ranks = self.save("step-1")
        if not self.wait("three ranks", lambda: all(r.poll() is not None for r in ranks)):
            return
        late = time.monotonic() + _LATE_S
        self.wait("a while", lambda: time.monotonic() > late)
        self.check("three of four ranks are done: a reader sees nothing", self.visible() == [])
        self.check("nor does anybody who looks into the store", self.raw() == [])
        ranks.append(self._stage.start_rank("step-1", WORLD_SIZE - 1, mib=_MIB, pause_s=_PAUSE_S))
        self.wait("the commit of step-1", lambda: self.latest() == "step-1")
        self.check("after the last commit everybody sees it", "step-1" in self.visible())
        self.check("`latest` means step-1", self.latest() == "step-1")
        self._check_bytes("step-1", ranks)

    def _check_bytes(self, name: str, ranks: list[subprocess.Popen[str]]) -> None:
        """A reader on the other node gets exactly the bytes that the ranks wrote."""
        wrote: dict[str, str] = {}
        for process in ranks:
            out, _ = process.communicate(timeout=_TIMEOUT_S)
            for line in out.splitlines():
                name_of_shard, _, digest = line.partition(" ")
                wrote[name_of_shard] = digest
        read: dict[str, str] = {}
        for rank in range(WORLD_SIZE):
            for shard in range(SHARDS):
                file = shard_name(rank, shard)
                path = os.path.join(self._stage.mounts[1], RUN, name, file)
                with open(path, "rb") as stream:
                    read[file] = blake3.blake3(stream.read()).hexdigest()
        self.check(f"a reader gets the very bytes of all {len(wrote)} shards", wrote == read)
        done = self._stage.command(
            "verify", os.path.join(self._stage.store, RUN, name), check=False
        )
        self.check(f"ckptgate verify: {done.stdout.strip()}", done.returncode == 0)

    def act_two(self) -> None:
        """A rank dies in the middle of a save."""
        self.say("\n[bold]2. They save step-2; rank 2 is killed in the middle of it.[/]")
        ranks = self.save("step-2")
        victim = ranks[2]
        assert victim.stdout is not None
        victim.stdout.readline()  # its first shard is written, it is busy with the second
        victim.send_signal(signal.SIGKILL)
        self.wait("the others", lambda: all(rank.poll() is not None for rank in ranks))
        self.check("step-2 is not to be seen", self.visible() == ["latest", "step-1"])
        self.check("`latest` still means step-1", self.latest() == "step-1")
        owed = [line for node in range(NODES) for line in self._owed(node, "step-2")]
        self.check(f"status says what is missing: {owed[0] if owed else 'nothing'}", bool(owed))
        path = os.path.join(self._stage.mounts[0], RUN, "step-2")
        done = self._stage.command("abort", path, "--reason", "rank 2 was killed", check=False)
        self.check(f"ckptgate abort: {done.stdout.strip()}", done.returncode == 0)

    def _owed(self, node: int, name: str) -> list[str]:
        rows = self._stage.report(node).get("attempts", [])
        return [line for row in rows if row["name"] == name for line in row["missing"]]

    def act_three(self) -> None:
        """The job starts again and saves."""
        self.say("\n[bold]3. The job is started again and saves step-2 once more.[/]")
        self._stage.job += "-again"
        ranks = self.save("step-2")
        ranks.append(self._stage.start_rank("step-2", WORLD_SIZE - 1, mib=_MIB, pause_s=_PAUSE_S))
        self.wait("the commit of step-2", lambda: self.latest() == "step-2")
        self.check("`latest` means step-2", self.latest() == "step-2")
        self._check_bytes("step-2", ranks)


def play(*, is_plain: bool) -> int:
    """Run the demo; 0 if every check held, else 1."""
    console = Console()
    is_plain = is_plain or not sys.stdout.isatty()
    began = time.monotonic()
    stage = Stage()
    show = _Play(stage, console, is_plain=is_plain)
    try:
        stage.open()
        show.say(f"Two mounts of one store, a spool each, below {stage.base}")
        for act in (show.act_one, show.act_two, show.act_three):
            act()
    except CkptError as exc:
        show.check(f"{exc.message} {exc.hint}", holds=False)
    finally:
        stage.close()
    took = time.monotonic() - began
    if show.failures:
        show.say(f"\n[red]{len(show.failures)} checks failed[/] after {took:.0f} s")
        return 1
    show.say(f"\n[green]Every check held[/], {took:.0f} s.")
    return 0
