"""EVENTS.md lists every event that the code logs and every kind of incident, and no others."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from ckptgate.app.logs import parse_template
from ckptgate.model.incidents import INCIDENTS

ROOT = Path(__file__).parents[2]
EVENTS = (ROOT / "gateway/EVENTS.md").read_text(encoding="utf-8")
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LIBRARIES = "message"
"""What a library says."""


def rows(heading: str) -> list[list[str]]:
    text = EVENTS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]


@functools.cache
def sources() -> dict[Path, str]:
    return {
        path: path.read_text(encoding="utf-8")
        for root in ("gateway", "adapters")
        for path in sorted((ROOT / root).rglob("*.py"))
    }


@functools.cache
def method_calls() -> tuple[tuple[str, str, str, ast.expr], ...]:
    """(where, object, method, first argument) of the calls that could log or tell something."""
    found = []
    for path, text in sources().items():
        if "_log." not in text and ".record(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                method = node.func.attr
                if method in LEVELS or method == "record":
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append((where, ast.unparse(node.func.value), method, node.args[0]))
    return tuple(found)


def log_calls() -> Iterator[tuple[str, str]]:
    """(where, template) of everything that is logged; the command line's front has no log."""
    for where, owner, method, first in method_calls():
        if owner == "_log" and method in LEVELS:
            yield where, ast.literal_eval(first)


def told_kinds() -> Iterator[tuple[str, str]]:
    """(where, kind) of all literals that may be the kind of an incident."""
    for where, owner, method, first in method_calls():
        if method == "record" and owner.endswith("events") and isinstance(first, ast.Constant):
            yield where, str(first.value)


def test_every_line_has_an_event_and_pairs():
    calls = list(log_calls())
    assert len(calls) > 100
    for where, template in calls:
        assert parse_template(template) is not None, f"{where}: {template}"


def test_every_event_of_the_log_is_described_and_no_other():
    described = {row[0].strip("`") for row in rows("Other events of the log")}
    logged: dict[str, str] = {}
    for where, text in log_calls():
        template = parse_template(text)
        assert template is not None
        logged[template.event] = where
    missing = set(logged) - described - set(INCIDENTS)
    assert not missing, [f"{event} at {logged[event]}" for event in sorted(missing)]
    assert described - set(logged) - {LIBRARIES} == set()


def test_every_kind_of_incident_is_described_with_its_severity():
    described = {row[0].strip("`"): row[1] for row in rows("Kinds of incidents")}
    assert described == {kind: str(known.severity) for kind, known in INCIDENTS.items()}


def test_every_incident_that_the_code_tells_has_a_kind_from_the_list():
    found = list(told_kinds())
    assert len(found) > 15
    for where, kind in found:
        assert kind in INCIDENTS, where


def test_every_kind_is_told_somewhere():
    text = "".join(text for path, text in sources().items() if path.name != "incidents.py")
    assert [kind for kind in INCIDENTS if f'"{kind}"' not in text] == []


def test_no_event_is_described_twice():
    names = [row[0] for head in ("Kinds of incidents", "Other events of the log")
             for row in rows(head)]  # fmt: skip
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"`[a-z0-9]+(-[a-z0-9]+)*`", name) for name in names)
