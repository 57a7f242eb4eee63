"""The daemon's log: one line an event, whatever is in its values; a library's requests never."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from ckptgate.app.logs import LineFormatter, is_journald, parse_template

CODE = """
import logging
from ckptgate.app.logs import configure_logging
configure_logging("DEBUG", process="test")
logging.getLogger("ckptgate.engine").debug("own line")
for name in ("botocore.auth", "aiobotocore.credentials", "s3fs", "urllib3.connectionpool"):
    logging.getLogger(name).debug("x-amz-security-token: SECRET")
    logging.getLogger(name).info("Found SECRET")
"""
FORGED = "step-1\n2026-01-01T00:00:00.000Z ERROR mount x decided attempt=forged\x1b[2J"


def line(template: str, *args: object, is_json: bool = False, has_priority: bool = False) -> str:
    formatter = LineFormatter("publisher", is_json=is_json, has_priority=has_priority)
    record = logging.LogRecord("ckptgate.x", logging.WARNING, "x.py", 1, template, args, None)
    return formatter.format(record)


def test_requests_of_client_libraries_with_their_tokens_are_in_no_log():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert "own line" in done.stderr
    assert "SECRET" not in done.stderr + done.stdout
    assert logging.getLogger("botocore").level != logging.DEBUG


def test_a_line_has_its_event_and_its_pairs():
    text = line("child-died name=%s code=%s: starting it again", "mount", -9)
    time, rest = text.split(" ", 1)
    assert time.endswith("Z")
    expected = 'WARNING publisher ckptgate.x child-died name=mount code=-9 note="starting it again"'
    assert rest == expected


@pytest.mark.parametrize("value", [FORGED, "a b", 'say "x"', "a=b", "", "\u202e", "x\u2028y"])
def test_no_value_can_forge_a_line_or_a_pair(value: str):
    """I13: names and messages of others."""
    text = line("decided attempt=%s entry=%s", value, "COMMIT")
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    before, _, after = text.partition(" decided attempt=")
    assert before.endswith("ckptgate.x")
    shown, end = json.JSONDecoder().raw_decode(after)
    assert (shown, after[end:]) == (value, " entry=COMMIT")


def test_a_json_line_has_values_as_they_are():
    found = json.loads(line("vote attempt=%s n=%d final=%s", FORGED, 3, True, is_json=True))
    assert found["event"] == "vote"
    assert (found["attempt"], found["n"], found["final"]) == (FORGED, 3, True)
    assert {"time", "level", "process", "logger"} <= set(found)


def test_a_field_that_is_called_like_one_of_every_line_keeps_its_place():
    found = json.loads(line("commit-event run=%r event=%s", "r", "rename", is_json=True))
    assert (found["event"], found["event_"], found["run"]) == ("commit-event", "rename", "r")


def test_journald_gets_priorities_and_no_time():
    assert line("stopping mountpoint=%s", "/m", has_priority=True) == (
        "<4>WARNING publisher ckptgate.x stopping mountpoint=/m"
    )


@pytest.mark.parametrize("is_json", [True, False])
def test_a_traceback_stays_with_its_line(is_json: bool):
    formatter = LineFormatter("mount", is_json=is_json, has_priority=True)
    try:
        raise ValueError("x\nforged line")
    except ValueError:
        record = logging.LogRecord(
            "n", logging.ERROR, "x.py", 1, "request-failed opcode=%d", (3,), sys.exc_info()
        )
    first, *rest = formatter.format(record).split("\n")
    assert first.startswith("<3>")
    assert all(line.startswith("<3>  | ") for line in rest)
    assert bool(rest) is not is_json


def test_what_is_no_event_is_a_message():
    text = line("Task was destroyed: %s", "it is pending")
    assert text.endswith('message text="Task was destroyed: it is pending"')
    # Arguments that don't fit are the logging module's to tell, not this one's to fail on.
    assert parse_template("Two words") is None


def test_the_journal_is_known_by_its_device_and_inode(tmp_path):
    with open(tmp_path / "f", "wb") as file:
        import os

        seen = os.fstat(file.fileno())
        own = f"{seen.st_dev}:{seen.st_ino}"
        assert is_journald(file.fileno(), {"JOURNAL_STREAM": own})
        assert not is_journald(file.fileno(), {"JOURNAL_STREAM": f"{seen.st_dev}:1"})
        assert not is_journald(file.fileno(), {})
    assert not is_journald(-1, {"JOURNAL_STREAM": "1:2"})
