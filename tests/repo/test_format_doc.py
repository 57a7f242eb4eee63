"""FORMAT.md tells the truth about the spool: tables, columns, settings, states and modes."""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path

import pytest

from ckptgate.model.documents import NameOpKind
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import LocalBytes, NodeKind, PendingKind, PlainOpKind
from ckptgate_adapters.sqlite_spool import SqliteSpool, schema

FORMAT = Path(__file__).parents[2] / "gateway" / "FORMAT.md"


def spool_part() -> str:
    text = FORMAT.read_text(encoding="utf-8")
    assert text.count("\n## The spool\n") == 1
    return text.split("\n## The spool\n", 1)[1].split("\n## ")[0]


def described_tables() -> dict[str, str]:
    """Text of each table's section by the table's name."""
    _, *sections = re.split(r"^### ", spool_part(), flags=re.MULTILINE)
    return {section.split("\n", 1)[0].strip(): section for section in sections}


def described_columns(section: str) -> dict[str, str]:
    table = section.split("| column | meaning |\n|---|---|\n")[1].split("\n\n", maxsplit=1)[0]
    rows = [line.strip("| ").split(" | ", 1) for line in table.splitlines()]
    return {name.strip(): meaning for name, meaning in rows}


@pytest.fixture(scope="module")
def schema_columns() -> dict[str, list[tuple[str, bool]]]:
    """(column, whether NULL is allowed) by table, as the database itself says."""
    connection = sqlite3.connect(":memory:")
    schema.create(connection, {})
    tables = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    ).fetchall()
    found = {
        table: [
            (column[1], not column[3] and not column[5])
            for column in connection.execute(f"PRAGMA table_info({table})")
        ]
        for (table,) in tables
    }
    connection.close()
    return found


def test_every_table_is_described_and_no_other(schema_columns):
    assert set(described_tables()) == set(schema_columns)


def test_every_column_is_described_in_its_order_and_no_other(schema_columns):
    for table, section in described_tables().items():
        names = [name for name, _ in schema_columns[table]]
        assert list(described_columns(section)) == names, table


def test_null_is_mentioned_just_where_it_is_allowed(schema_columns):
    for table, section in described_tables().items():
        for (name, is_nullable), meaning in zip(
            schema_columns[table], described_columns(section).values(), strict=True
        ):
            assert ("NULL" in meaning) is is_nullable, f"{table}.{name}"


@pytest.mark.parametrize(
    ("table", "column", "values"),
    [
        ("nodes", "kind", NodeKind),
        ("files", "state", FileState),
        ("files", "local", LocalBytes),
        ("attempts", "state", AttemptState),
        ("pending", "kind", PendingKind),
        ("name_ops", "op", NameOpKind),
        ("plain_ops", "op", PlainOpKind),
    ],
)
def test_every_value_of_an_enumeration_is_described(table, column, values):
    meaning = described_columns(described_tables()[table])[column]
    for value in values:
        assert f"`{value}`" in meaning, value


def test_the_settings_and_files_of_a_new_spool_are_described(tmp_path):
    spool = SqliteSpool.create_or_open(str(tmp_path / "s"), store_url="file:///s", host="h")
    settings = [row[0] for row in spool._db.all("SELECT key FROM meta")]
    described = described_tables()["meta"]
    assert all(f"`{key}`" in described for key in settings), settings
    text = spool_part()
    assert all(f"  {name} " in text or f"  {name}/" in text or f" {name} " in text
               for name in os.listdir(spool.path))  # fmt: skip
    assert f"{schema.APPLICATION_ID:#x}" in text
    assert f"Format {schema.SPOOL_FORMAT};" in text
    spool.close()
