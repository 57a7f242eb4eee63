"""Logging of the daemon, to standard error: one line a state change, with a stable event name.

It owns the rule how a call `log.info("event-name key=%s: note", value)` becomes a line: the event
and its fields are taken from the call's template, so no value, whatever is in it, can forge a field
or a line. EVENTS.md lists the names. Under journald a line begins with its priority and leaves the
time to the journal. Configured once a process; any thread logs.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["LineFormatter", "configure_logging", "is_journald", "parse_template"]

_CLIENTS: Final = ("aiobotocore", "aiohttp", "asyncio", "botocore", "fsspec", "s3fs", "urllib3")
"""At DEBUG these write requests with their headers, a session's token among them."""
_PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
_DEBUG_PRIORITY: Final = 7
_EVENT: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*|%s")
_FIELD: Final = re.compile(r" ([a-z][a-z0-9_]*)=('[^']*'|[^\s':]+)")
_CONVERSION: Final = re.compile(r"%[^%a-zA-Z]*[a-zA-Z]")
_PLAIN: Final = re.compile(r"[^\s\"'=]+")
_CONTINUED: Final = "  | "
"""How the lines of a traceback begin, so that none can pass for a line of its own."""


@dataclass(frozen=True, slots=True)
class _Template:
    """A call's template in parts.

    Attributes:
        event: its name, `%s` where the call gives it.
        fields: (key, template of its value), in order.
        note: what follows for people, a template too.
    """

    event: str
    fields: tuple[tuple[str, str], ...]
    note: str


@functools.lru_cache(maxsize=1024)
def parse_template(template: str) -> _Template | None:
    """The parts of `event-name key=%s ...: note`; None if it isn't of that form."""
    event = _EVENT.match(template)
    if event is None:
        return None
    at = event.end()
    fields: list[tuple[str, str]] = []
    while field := _FIELD.match(template, at):
        fields.append((field[1], field[2].strip("'")))
        at = field.end()
    rest = template[at:]
    if rest and not rest.startswith(": "):
        return None
    return _Template(event.group(), tuple(fields), rest[2:])


class LineFormatter(logging.Formatter):
    """Makes the lines."""

    def __init__(self, process: str, *, is_json: bool, has_priority: bool) -> None:
        """Prepare.

        Args:
            process: which of the daemon's it is.
            is_json: an object a line instead of `key=value`.
            has_priority: journald reads them: begin with `<3>` and the like, tell no time.
        """
        super().__init__()
        self._process = process
        self._is_json = is_json
        self._has_priority = has_priority

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, or lines where a traceback follows."""
        event, fields, note = _parts(record)
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            lines = [self._json(record, event, fields, note, trace)]
        else:
            lines = [self._text(record, event, fields, note)]
            lines += [_CONTINUED + _printable(line) for line in trace.splitlines()]
        if not self._has_priority:
            return "\n".join(lines)
        return "\n".join(f"<{_priority(record.levelno)}>{line}" for line in lines)

    def _text(
        self, record: logging.LogRecord, event: str, fields: Mapping[str, Any], note: str
    ) -> str:
        words = [record.levelname, self._process, record.name, event]
        if not self._has_priority:
            words.insert(0, _time(record))
        words += [f"{key}={_quoted(str(value))}" for key, value in fields.items()]
        if note:
            words.append(f"note={_quoted(note)}")
        return " ".join(words)

    def _json(
        self,
        record: logging.LogRecord,
        event: str,
        fields: Mapping[str, Any],
        note: str,
        trace: str,
    ) -> str:
        known = {
            "time": _time(record),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "event": event,
        }
        told = {**known, **{f"{key}_" if key in known else key: fields[key] for key in fields}}
        told |= {key: text for key, text in (("note", note), ("traceback", trace)) if text}
        return json.dumps(told, default=str)


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, Any], str]:
    """Event, fields and note of a record; a library's free text is the event `message`."""
    args = record.args if isinstance(record.args, tuple) else ()
    template = parse_template(record.msg) if isinstance(record.msg, str) else None
    if template is not None:
        left = iter(args)
        try:
            event = str(next(left)) if template.event == "%s" else template.event
            fields = {key: _value(text, left) for key, text in template.fields}
            note = str(_value(template.note, left))
        except (StopIteration, TypeError, ValueError):
            pass
        else:
            return event, fields, note
    return "message", {"text": record.getMessage()}, ""


def _value(template: str, args: Any) -> Any:
    """What a field's template makes of the arguments that it takes."""
    if template in {"%s", "%r", "%d"}:
        value = next(args)
        return value if isinstance(value, int | float) else str(value)
    taken = tuple(next(args) for _ in _CONVERSION.finditer(template))
    return template % taken if taken else template


def _quoted(text: str) -> str:
    """A value that is read back as one, and stays on its line."""
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _printable(text: str) -> str:
    """A line of a traceback without what moves a terminal's cursor."""
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _priority(level: int) -> int:
    """As syslog counts."""
    return next((number for least, number in _PRIORITIES if level >= least), _DEBUG_PRIORITY)


def is_journald(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether what is written to *fd* goes to the journal, as systemd tells its services."""
    try:
        seen = os.fstat(fd)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{seen.st_dev}:{seen.st_ino}"


def configure_logging(level: str, *, process: str, form: str = "text") -> None:
    """Send the log to standard error; the supervisor's parent points that at the log file.

    Args:
        level: the least one that is written.
        process: which of the daemon's this is.
        form: `text` or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    has_priority = is_journald(sys.stderr.fileno(), os.environ)
    handler.setFormatter(LineFormatter(process, is_json=form == "json", has_priority=has_priority))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in _CLIENTS:
        logging.getLogger(name).setLevel(logging.WARNING)
