"""Somebody outside of the job who looks at a run's directory, wherever it can be seen.

It reads every checkpoint that it finds with the framework's own reader, in a process of its own,
and compares the files and all that is in them with those of an undisturbed run: what differs or
can't be read must not be seen. Where a framework's own rule for the newest one leads, it looks too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.frameworks.trainings.rules import Rules

__all__ = ["Observer", "Sight"]

PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Sight:
    """Something that must not be seen.

    Attributes:
        place: where.
        name: of the checkpoint or pointer.
        what: is wrong with it.
        is_newest: the framework's own rule led to it.
    """

    place: str
    name: str
    what: str
    is_newest: bool


@dataclass(slots=True)
class Observer:
    """Looks at several places again and again.

    Attributes:
        rules: of the framework whose checkpoints these are.
        places: name -> the run's directory there.
        read: reads a checkpoint; `{"files", "digest"}` or `{"error"}`.
        known: checkpoint -> the same of an undisturbed run.
        wrong: what must not be seen.
        whole: place and name of what was seen as it should be.
    """

    rules: Rules
    places: Mapping[str, Path]
    read: Callable[[Path], dict[str, Any]]
    known: Mapping[str, Any]
    wrong: set[Sight] = field(default_factory=set)
    whole: set[tuple[str, str]] = field(default_factory=set)
    rounds: int = 0
    _verdicts: dict[object, str] = field(default_factory=dict)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Observer:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive(), "the observer hangs"

    def _run(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            self.look()

    def look(self) -> None:
        """Once everywhere."""
        for place, run in self.places.items():
            try:
                if run.is_dir():
                    self._look(place, run)
            except Exception:  # noqa: BLE001 - whatever it is, it must not happen
                self.wrong.add(Sight(place, "", traceback.format_exc(), is_newest=True))
        self.rounds += 1

    def _look(self, place: str, run: Path) -> None:
        for name in sorted(os.listdir(run)):
            if self.rules.step.fullmatch(name) and (run / name).exists():
                self._judge(place, run / name, is_newest=False)
        with contextlib.suppress(FileNotFoundError):
            # It was removed between its listing and its reading.
            newest = self.rules.newest(run)
            if newest is not None and (newest.exists() or newest == self.rules.newest(run)):
                self._judge(place, newest, is_newest=True)

    def _judge(self, place: str, path: Path, *, is_newest: bool) -> None:
        before = _look_of(path)
        what = self._verdicts.get((place, before))
        if what is None:
            what = self._read(path)
            # What changed or went meanwhile is looked at again. That a file of another node went is
            # known here after a second.
            if _look_of(path) != before or (what and not is_newest and _goes(path)):
                return
            self._verdicts[place, before] = what
        if what:
            self.wrong.add(Sight(place, path.name, what, is_newest))
        else:
            self.whole.add((place, path.resolve().name))

    def _read(self, path: Path) -> str:
        found = self.read(path)
        if "error" in found:
            return f"{found['error']} (has {sorted(_names(path))})"
        expected = self.known.get(path.resolve().name)
        if expected is None:
            return "there should be none of that name"
        if found["files"] != expected["files"]:
            return f"has {found['files']}, not {expected['files']}"
        return "" if found["digest"] == expected["digest"] else "other contents"


def _goes(path: Path) -> bool:
    """Whether it goes within two seconds."""
    deadline = time.monotonic() + 2
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not path.exists()


def _names(path: Path) -> list[str]:
    return [str(name.relative_to(path)) for name in path.rglob("*")] if path.is_dir() else []


def _look_of(path: Path) -> tuple[Any, ...]:
    """What is there, told by its attributes; another value once anything changed."""
    found: list[tuple[Any, ...]] = [(str(path), os.path.realpath(path))]
    with contextlib.suppress(OSError):
        for name in (path, *(sorted(path.rglob("*")) if path.is_dir() else ())):
            at = name.stat()
            found.append((str(name), at.st_ino, at.st_size, at.st_mtime_ns))
    return tuple(found)
