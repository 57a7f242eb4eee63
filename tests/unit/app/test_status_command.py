"""`status` for people: the live view and the plain one, with names as text; and its exit code."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from tests.reports import a_report, a_run, an_attempt, an_event

from ckptgate.app.commands import status as command
from ckptgate.app.commands.output import human_seconds, printable
from ckptgate.app.commands.watch import mount_view
from ckptgate.app.locate import Served
from ckptgate.app.registry import MountInfo
from ckptgate.engine.attempt_status import AttemptStatus, MemberStatus, RankStatus
from ckptgate.errors import ExitCode
from ckptgate.model.states import DELETED, REMOVED, RENAMED_OVER, UNCHANGED
from ckptgate.ports.spool import SpoolRoom

MARKUP = "[red]x[/red] [link=file:///etc]y[/link] :bomb:"


def document(**report: Any) -> dict[str, Any]:
    """As the daemon answers."""
    found = {
        "store": "/nfs", "mountpoint": "/mnt", "page": "",
        "contact": {"is_reached": True, "age_s": 1.0, "error": ""},
        "disk": {"total": 1 << 40, "free": 1 << 39}, **a_report(**report).to_json(),
    }  # fmt: skip
    return json.loads(json.dumps(found))


def a_rank(rank: int, **changes: Any) -> RankStatus:
    values: dict[str, Any] = {
        "rank": rank, "files": 1, "staged_bytes": 100, "digested_bytes": 80, "stored_bytes": 50,
        "committed": False, "voted": False,
    }  # fmt: skip
    return RankStatus(**{**values, **changes})


def a_save(**changes: Any) -> AttemptStatus:
    values: dict[str, Any] = {
        "state": "sealed", "files": {"stored": 1, "open": 1}, "size_bytes": 200,
        "digested_bytes": 160, "stored_bytes": 100, "rate_bytes_s": 10.0, "eta_s": 10.0,
        "ranks": (a_rank(0, committed=True), a_rank(1)), "missing": ("rank 1 owes b.bin",),
        "members": (MemberStatus(member="a", voted=True), MemberStatus(member="b", voted=False)),
    }  # fmt: skip
    return an_attempt(**{**values, **changes})


def view(report: dict[str, Any], width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, emoji=False).print(mount_view("/mnt", report))
    return out.getvalue()


def plain(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    command._print_report(report)
    return capsys.readouterr().out


def test_the_live_view_tells_each_rank_pace_and_incidents():
    text = view(document(
        attempts=(a_save(), an_attempt(name="step-0", state="committed", phases={"commit": 3.0})),
        runs=(a_run("run"),), events=(an_event(), an_event("evicted")),
        room=SpoolRoom(used=10, limit=20, is_full=True),
    ))  # fmt: skip
    for word in ("run/step-1", "sealed", "rank 0", "rank 1", "committed", "100 B (50 %)",
                 "(1 of 2 nodes)", "10 B/s, 10 s left", "rank 1 owes b.bin", "took 3 s",
                 "newest step-7", "spool is full", "-> "):  # fmt: skip
        assert word in text, word
    assert text.index("run/step-1") < text.index("step-0")
    assert "evicted" not in text


def test_both_say_what_is_being_finished_and_how_long_that_may_take(capsys):
    found = document()
    assert "left for what is under way" not in view(found) + plain(found, capsys)
    for why, word in (("drain", "draining"), ("stop", "stopping"), ("end", "ending")):
        found["finishing"] = {"why": why, "refuses_new": True, "deadline": "", "left_s": 42.0}
        words = f"{word}: 42 s left for what is under way, no new checkpoints are taken"
        assert words in view(found)
        assert words in plain(found, capsys)


def test_the_plain_report_tells_the_same(capsys):
    text = plain(document(attempts=(a_save(),), events=(an_event(),)), capsys)
    for word in ("run/step-1  sealed  1/2 files in the store, 200 B, 10 B/s, 10 s left",
                 "rank 0: 100 B staged, 80 B digested, 50 B in the store, committed",
                 "rank 1 owes b.bin", "aborted: run/step-1: why", "save again"):  # fmt: skip
        assert word in text, word


def test_a_store_that_is_away_is_told(capsys):
    report = document()
    report["contact"] = {"is_reached": False, "age_s": 200.0, "error": "gone"}
    assert "the store does not answer (for 3 min): gone" in plain(report, capsys)
    assert "store does not answer: gone" in view(report)


@pytest.mark.parametrize("hostile", [MARKUP, "\x1b[2J\x1b]0;x\x07", "a\nb\r\tc\u202e"])
def test_names_are_neither_markup_nor_terminal_codes(hostile: str, capsys):
    """I13."""
    report = document(
        attempts=(a_save(name=hostile, reason=hostile, missing=(hostile,)),),
        runs=(a_run(hostile),), events=(an_event("aborted", hostile, hostile),),
    )  # fmt: skip
    shown = view(report, 400)
    assert "\x1b" not in shown
    if hostile == MARKUP:
        assert MARKUP in shown
    assert printable(hostile) in plain(report, capsys)
    assert printable(hostile).isprintable()


@pytest.mark.parametrize(
    ("states", "changes", "code"),
    [
        ([], {}, ExitCode.OK),
        (["committed"], {}, ExitCode.OK),
        (["committed", "open"], {}, ExitCode.PENDING),
        (["sealed"], {}, ExitCode.PENDING),
        (["aborted"], {}, ExitCode.REFUSED),
        (["aborted", "committed"], {}, ExitCode.OK),
        (["abandoned", "committed"], {}, ExitCode.OK),
        (["committed", "abandoned"], {}, ExitCode.REFUSED),
        (["committed", "aborted", "open"], {}, ExitCode.REFUSED),
        (["open"], {"is_hidden": True}, ExitCode.REFUSED),
    ],
)
def test_the_exit_code(states: list[str], changes: dict[str, Any], code: ExitCode):
    rows = tuple(an_attempt(state=state, **changes) for state in states)
    assert command._status_code(document(attempts=rows)) == code


@pytest.mark.parametrize("reason", [DELETED, REMOVED, UNCHANGED, f"{RENAMED_OVER}step-1.tmp"])
def test_what_a_job_took_away_itself_is_no_lost_save(reason: str):
    rows = [an_attempt(state="committed"), an_attempt(state="abandoned", reason=reason)]
    assert command._status_code(document(attempts=tuple(rows))) == ExitCode.OK
    rows[0] = an_attempt(state="aborted", reason="rank 1 failed")
    assert command._status_code(document(attempts=tuple(rows))) == ExitCode.REFUSED


def test_a_record_in_doubt_and_a_silent_daemon_have_their_codes():
    in_doubt = document(runs=(a_run("run", in_doubt=True),))
    assert command._status_code(in_doubt) == ExitCode.REFUSED
    assert command._status_code({"error": "x"}) == ExitCode.UNUSABLE


def test_times_for_people():
    assert [human_seconds(s) for s in (0.4, 119, 121, 7200)] == ["0 s", "119 s", "2 min", "2.0 h"]


def test_a_daemon_of_an_older_release_is_told_apart(monkeypatch, capsys):
    mount = MountInfo(mountpoint="/mnt", store="/nfs", spool="/spool", pid=1, start=1)
    monkeypatch.setattr(command, "ask", lambda *_: {"attempts": []})
    report = command._report(Served(mount=mount, below=""))
    assert command._status_code(report) == ExitCode.UNUSABLE
    assert "older release" in plain(report, capsys)
