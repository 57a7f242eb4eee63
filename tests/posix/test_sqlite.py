"""SQLite on the mount: every journal mode, two writers, and no page lost."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fuse]

MODES = ["delete", "truncate", "persist", "memory", "wal", "off"]

WRITER = """
import sqlite3, sys
path, mode, who = sys.argv[1:]
db = sqlite3.connect(path, timeout=60, isolation_level=None)
db.execute(f"PRAGMA journal_mode={mode}")
for number in range(40):
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO t (who, number, filler) VALUES (?, ?, ?)", (who, number, "x" * 3000))
    db.execute("UPDATE counter SET n = n + 1")
    db.execute("ROLLBACK" if mode not in ("off", "memory") and number % 10 == 9 else "COMMIT")
db.close()
"""


@pytest.mark.parametrize("mode", MODES)
def test_two_writers_lose_nothing_in_any_journal_mode(place: Path, mode: str):
    path = place / f"{mode}.db"
    db = sqlite3.connect(path, isolation_level=None)
    assert db.execute(f"PRAGMA journal_mode={mode}").fetchone()[0] == mode
    db.execute("CREATE TABLE t (who, number, filler)")
    db.execute("CREATE TABLE counter (n)")
    db.execute("INSERT INTO counter VALUES (0)")
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, mode, who]) for who in ("a", "b")
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    kept = 40 if mode in {"off", "memory"} else 36
    assert db.execute("SELECT n FROM counter").fetchone()[0] == 2 * kept
    rows = db.execute("SELECT who, count(*) FROM t GROUP BY who ORDER BY who").fetchall()
    assert rows == [("a", kept), ("b", kept)]
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.execute("VACUUM")
    db.close()
    with sqlite3.connect(path) as again:
        assert again.execute("PRAGMA quick_check").fetchone()[0] == "ok"
    again.close()


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_the_command_line_tool_backs_up_and_recovers(place: Path, mode: str, require):
    require(shutil.which("sqlite3"), "sqlite3 is not installed")

    def run(name: str, *statements: str) -> str:
        done = subprocess.run(
            ["sqlite3", "-bail", name, *statements],
            cwd=place, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout

    run(
        "a.db",
        f"PRAGMA journal_mode={mode};",
        "CREATE TABLE t AS WITH RECURSIVE n (v) AS "
        "(SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < 20000) SELECT v, hex(v) AS h FROM n;",
        "CREATE INDEX i ON t (h);",
    )
    run("a.db", ".backup copy.db")
    assert run("copy.db", "PRAGMA integrity_check;", "SELECT count(*) FROM t;") == "ok\n20000\n"
    assert run("a.db", ".sha3sum") == run("copy.db", ".sha3sum")
