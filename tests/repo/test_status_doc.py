"""STATUS.md lists the report's keys and the metrics; rules and dashboard use no others."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.reports import a_report, a_run, an_attempt

from ckptgate.engine.attempt_status import AttemptStatus, MemberStatus, RankStatus
from ckptgate.engine.contact import Reached
from ckptgate.engine.events import Event
from ckptgate.engine.status import Finishing, RunStatus
from ckptgate_adapters.metrics.exposition import RUNS_MAX, Seen, exposition
from ckptgate_adapters.metrics.mapped import read_meters

ROOT = Path(__file__).parents[2]
STATUS = (ROOT / "gateway/STATUS.md").read_text(encoding="utf-8")
MONITORING = ROOT / "systemd/monitoring"
ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
RULES = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
NAME = re.compile(r"\bckptgate_[a-z_]+\b")
HOSTILE = 'run"1\\\n# HELP x\n{a="b"} \u2028<b>\udcff'


def seen(tmp_path: Path, *, runs: tuple[RunStatus, ...] = (), **changes: Any) -> Seen:
    attempts = (
        an_attempt(state="committed", committed_at="2026-01-01T00:00:05.000Z"),
        an_attempt(),
    )
    report = a_report(attempts=attempts, runs=runs or (a_run("run"),))
    values: dict[str, Any] = {
        "readings": read_meters(str(tmp_path)), "report": report,
        "contact": Reached(is_reached=True, age_s=1.0, error=""), "is_mount_usable": True,
        "version": "1", "mountpoint": "/m", "store": "/s", "member": "m", "spool_bytes": 1,
        "disk_bytes": 10, "disk_free_bytes": 5, "now_s": 1767225700.0, "monotonic_s": 100.0,
    }  # fmt: skip
    return Seen(**{**values, **changes})


def series(text: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def keys_under(heading: str) -> set[str]:
    text = STATUS.split(f"\n{heading}\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("heading", "kind", "more"),
    [
        ("### An attempt", AttemptStatus, set()),
        ("### A rank", RankStatus, set()),
        ("### A member", MemberStatus, set()),
        ("### A run", RunStatus, set()),
        ("### An incident", Event, {"severity", "hint"}),
    ],
)
def test_every_key_of_the_report_is_described_and_no_other(
    heading: str, kind: type, more: set[str]
):
    fields = (
        set(kind.__struct_fields__)
        if hasattr(kind, "__struct_fields__")
        else {field.name for field in dataclasses.fields(kind)}
    )
    assert keys_under(heading) == fields | more


def metric_rows() -> dict[str, tuple[str, set[str]]]:
    """Name -> (type, labels)."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in STATUS.split("\n## Metrics\n")[1].splitlines():
        if line.startswith("| `ckptgate_"):
            names, kind, labels = (cell.strip() for cell in line.split("|")[1:4])
            words = set(re.findall(r"[a-z_]+", re.sub(r"\(.*?\)", "", labels)))
            found |= dict.fromkeys(NAME.findall(names), (kind, words))
    return found


def test_every_metric_is_described_with_its_type_and_labels_and_no_other(tmp_path: Path):
    told: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(exposition(seen(tmp_path)).decode()):
        if not family.name.startswith("ckptgate_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {key for sample in family.samples for key in sample.labels} - {"le"}
        told[name] = (family.type, labels)
    assert told == metric_rows()


def test_names_of_runs_are_escaped_and_few(tmp_path: Path):
    """I13: a run is called whatever a user likes."""
    runs = (a_run(HOSTILE), *(a_run(f"run-{n}") for n in range(500)))
    text = exposition(seen(tmp_path, runs=runs))
    found = [labels["run"] for name, labels, _ in series(text) if name == "ckptgate_log_entries"]
    assert len(found) == RUNS_MAX
    assert found[0] == HOSTILE.encode(errors="backslashreplace").decode()
    assert len(list(series(text))) < 600


def test_ages_and_times_are_what_they_are_called(tmp_path: Path):
    values = {name: value for name, labels, value in series(exposition(seen(tmp_path)))}
    assert values["ckptgate_oldest_unpublished_age_seconds"] == pytest.approx(100)
    assert values["ckptgate_last_commit_timestamp_seconds"] == 1767225605
    assert values["ckptgate_store_last_contact_timestamp_seconds"] == 1767225699
    assert values["ckptgate_unstored_bytes"] == 2
    assert values["ckptgate_last_committed_step"] == 7


def expressions() -> list[str]:
    found = [str(rule["expr"]) for rule in RULES.values()]
    for panel in DASHBOARD["panels"]:
        found += [target["expr"] for target in panel["targets"]]
    return [*found, DASHBOARD["templating"]["list"][1]["query"]["query"]]


def test_rules_and_dashboard_use_only_what_is_exported(tmp_path: Path):
    exported = {name for name, _, _ in series(exposition(seen(tmp_path)))}
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(used) > 20
    assert used - exported == set()
    for expression in expressions():
        for name, value in re.findall(r'(result|kind)=~"([^"]+)"', expression):
            said = {labels.get(name) for _, labels, _ in series(exposition(seen(tmp_path)))}
            assert set(value.split("|")) <= said, expression


def test_the_dashboard_has_what_grafana_asks_for():
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["title"]
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in {"stat", "timeseries", "table"}
        assert panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def dropped(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Where *given* has what *kept* hasn't."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from dropped(value, kept.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, pair in enumerate(zip(given, kept, strict=True)):
            yield from dropped(*pair, f"{path}[{number}]")
    elif given != kept:
        yield path


def test_grafana_s_own_types_know_all_that_the_dashboard_says():
    """Nothing is lost on the way through them; the label of a variable is of its editor alone."""
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    read = dashboard.Dashboard.from_json(DASHBOARD)
    kept = json.loads(encoder.JSONEncoder().encode(read))
    assert list(dropped(DASHBOARD, kept)) == [".templating.list[1].definition"]
    wrong = {**DASHBOARD, "panels": [{**DASHBOARD["panels"][0], "gridPosition": {"x": 1}}]}
    kept = json.loads(encoder.JSONEncoder().encode(dashboard.Dashboard.from_json(wrong)))
    assert ".panels[0].gridPosition" in set(dropped(wrong, kept))


@pytest.fixture(scope="module")
def promtool(require: Callable[[object, str], None]) -> str:
    found = shutil.which("promtool")
    require(found, "promtool is not installed (Debian: prometheus)")
    return str(found)


def test_promtool_takes_what_is_exported(promtool: str, tmp_path: Path):
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exposition(seen(tmp_path)),
        capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.decode(), done.stdout.decode()) == (0, "", "")


def test_promtool_takes_the_rules(promtool: str):
    for words in (("rules", MONITORING / "alerts.yml"), ("config", MONITORING / "prometheus.yml")):
        done = subprocess.run(
            [promtool, "check", *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


FIRES = {
    "CkptgateDown": ('up{job="ckptgate"}', "0", "1"),
    "CkptgateMountUnusable": ("ckptgate_mount_usable{}", "0", "1"),
    "CkptgateRequestStuck": ("ckptgate_request_oldest_seconds{}", "61", "59"),
    "CkptgateRequestsSlow": ('ckptgate_request_longest_seconds{kind="look"}', "6", "4"),
    "CkptgateStoreAway": ("ckptgate_store_reachable{}", "0", "1"),
    "CkptgateSaveLost": ('ckptgate_saves_total{result="late"}', "0+1", "4"),
    "CkptgateVerifyFailed": ('ckptgate_verify_failures_total{where="read"}', "0+1", "4"),
    "CkptgateIncident": ('ckptgate_incidents_total{kind="power-lost"}', "0+1", "4"),
    "CkptgateSpoolFull": ("ckptgate_spool_full{}", "1", "0"),
    "CkptgateSpoolLow": ('ckptgate_incidents_total{kind="spool-low"}', "0+1", "4"),
    "CkptgateSpoolDiskLow": ("ckptgate_spool_disk_free_bytes{}", "4", "6"),
    "CkptgateUnpublishedLong": ("ckptgate_oldest_unpublished_age_seconds{}", "3601", "3599"),
    "CkptgateHidden": ("ckptgate_hidden_checkpoints{}", "1", "0"),
    "CkptgateLogInDoubt": ('ckptgate_log_in_doubt{run="r"}', "1", "0"),
    "CkptgateUploadErrors": ('ckptgate_upload_errors_total{kind="full"}', "0+1", "4"),
    "CkptgateHookFailing": ('ckptgate_hook_runs_total{result="timeout"}', "0+1", "4"),
    "CkptgatePassthroughOff": ("ckptgate_passthrough{}", "0", "1"),
}
"""Alert -> a series, values of it that fire, values that don't."""


def rule_test(alert: str) -> Iterator[dict[str, Any]]:
    selector, bad, good = FIRES[alert]
    rule = RULES[alert]
    name, _, labels = selector.partition("{")
    pairs = labels.rstrip("}")
    full = f'{name}{{{pairs}{"," if pairs else ""}instance="node"}}'
    told = dict(re.findall(r'(\w+)="([^"]*)"', full))
    for values, is_firing in ((bad, True), (good, False)):
        step = f"{values}x60" if "+" in values else f"{values}+0x60"
        expected = {
            "exp_labels": {**told, **rule["labels"]},
            "exp_annotations": {
                key: text.replace("{{ $labels.instance }}", "node")
                for key, text in rule["annotations"].items()
            },
        }
        yield {
            "interval": "1m",
            "input_series": [
                {"series": full, "values": step},
                {"series": 'ckptgate_spool_disk_bytes{instance="node"}', "values": "100+0x60"},
            ],
            "alert_rule_test": [
                {
                    "eval_time": "40m",
                    "alertname": alert,
                    "exp_alerts": [expected] if is_firing else [],
                }
            ],
        }


def test_what_a_person_has_aborted_fires_nothing(promtool: str, tmp_path: Path):
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    series = [
        'ckptgate_saves_total{result="cancelled",instance="node"}',
        'ckptgate_incidents_total{kind="cancelled",instance="node"}',
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": each, "values": "0+1x60"} for each in series],
        "alert_rule_test": [
            {"eval_time": "40m", "alertname": alert, "exp_alerts": []} for alert in RULES
        ],
    }
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [test]}))
    done = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_left_of_a_budget_is_told(tmp_path: Path):
    now_s = 1767225700.0
    ends = Finishing(
        why="drain", refuses_new=True, deadline="", deadline_ns=int((now_s + 30) * 1e9)
    )
    for report, left_s, on in ((a_report(finishing=ends), 30, {"drain"}), (a_report(), 0, set())):
        text = exposition(seen(tmp_path, report=report, now_s=now_s))
        found = {(name, labels.get("why")): value for name, labels, value in series(text)}
        assert found["ckptgate_finishing_left_seconds", None] == pytest.approx(left_s)
        is_on = {why for (name, why), value in found.items() if value and why}
        assert is_on == on


def test_every_alert_has_a_test():
    assert set(FIRES) == set(RULES)
    for rule in RULES.values():
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_each_alert_fires_when_it_should_and_not_else(promtool: str, tmp_path: Path):
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    tests = [test for alert in RULES for test in rule_test(alert)]
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
