"""SEMANTICS.md: each row of its tables names tests, and these exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEMANTICS = (ROOT / "gateway/SEMANTICS.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
HEAD = "| call | result | test |"


def rows() -> list[list[str]]:
    """Cells of all rows of what calls mean, without heads and rulers."""
    found = []
    for line in SEMANTICS.split("\n## Differences")[0].splitlines():
        if not line.startswith("|") or line == HEAD or set(line) <= {"|", "-"}:
            continue
        found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Names of the test functions in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_there_is_a_table_in_each_section_but_the_last():
    first, *sections = SEMANTICS.split("\n## ")
    assert HEAD not in first
    assert [HEAD in section for section in sections] == [True] * (len(sections) - 1) + [False]


@pytest.mark.parametrize("row", rows(), ids=lambda row: re.sub(r"[^\w ]", "", row[0])[:60])
def test_each_row_names_tests_that_exist(row: list[str]):
    assert len(row) == 3, row
    assert all(row)
    named = TEST.findall(row[2])
    assert named
    assert TEST.sub("", row[2]).replace("<br>", "") == ""
    for path, name in named:
        assert name in names_in(path), f"{path}::{name}"


def test_every_test_of_the_semantics_is_in_a_row():
    named = {pair for row in rows() for pair in TEST.findall(row[2])}
    for path in sorted((ROOT / "tests/e2e").glob("test_semantics_*.py")):
        relative = str(path.relative_to(ROOT))
        for name in sorted(names_in(relative)):
            assert (relative, name) in named, f"no row names {relative}::{name}"
