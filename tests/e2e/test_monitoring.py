"""A real Prometheus that scrapes a real mount: each panel has data, rules are loaded and quiet."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.harness import FAST, Gateway, cli, cluster, job, until
from tests.ports import free_port

pytestmark = [pytest.mark.fuse, pytest.mark.full]

MONITORING = Path(__file__).parents[2] / "systemd/monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
VARIABLES = {"$instance": ".*", "$__rate_interval": "10s"}
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['id']}-{target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
SAVE = """
import os, sys
os.makedirs(sys.argv[1])
with open(sys.argv[1] + "/a.bin", "wb") as stream:
    stream.write(b"a" * 100_000)
os.setxattr(sys.argv[1], "user.ckptgate.commit", b"all")
"""


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **words: str) -> Any:
        query = urllib.parse.urlencode({k.replace("_", "[]"): v for k, v in words.items()})
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def value(self, expression: str) -> list[Any]:
        """The series that it gives now."""
        return list(self.ask("query", query=expression)["result"])

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return [it["value"][1] for it in self.value('up{job="ckptgate"}')] == ["1"]
        return False


@contextlib.contextmanager
def scraping(program: str, base: Path, target: int) -> Iterator[Prometheus]:
    """The shipped configuration with this node and a shorter interval."""
    base.mkdir()
    shutil.copy(MONITORING / "alerts.yml", base)
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"evaluation_interval": "1s"}
    (scrape,) = config["scrape_configs"]
    scrape |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    (base / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    words = [
        f"--config.file={base}/prometheus.yml", f"--storage.tsdb.path={base}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (base / "log").open("wb") as log:
        process = subprocess.Popen([program, *words], stdout=log, stderr=log)
    try:
        made = Prometheus(port)
        until("it scrapes the node", made.is_up, 60)
        yield made
    finally:
        process.terminate()
        process.wait(30)


def saves(node: Gateway, numbers: range) -> None:
    for number in numbers:
        path = node.mnt / f"run/step-{number}"
        assert job(SAVE, path).returncode == 0
        assert cli("wait", path, "--timeout", "60").returncode == 0


@pytest.fixture(scope="module")
def scraped(require, tmp_path_factory) -> Iterator[Prometheus]:
    """One mount on which saves are made between two scrapes, and its Prometheus."""
    require(os.access("/dev/fuse", os.R_OK | os.W_OK), "/dev/fuse is not accessible")
    program = shutil.which("prometheus")
    require(program, "prometheus is not installed (Debian: prometheus)")
    base = tmp_path_factory.mktemp("scraped")
    target = free_port()
    config = f"{FAST}[status]\nmetrics_listen = '127.0.0.1:{target}'\n"
    with (
        cluster(base, config=config) as made,
        scraping(str(program), base / "prometheus", target) as prometheus,
    ):
        (node,) = made.nodes
        (node.mnt / "run").mkdir()
        saves(node, range(1, 3))
        count = 'ckptgate_saves_total{result="committed"}'
        until("they are counted", lambda: _is(prometheus, count, 2), 60)
        saves(node, range(3, 5))
        until("these, too", lambda: _is(prometheus, count, 4), 60)
        yield prometheus


def _is(prometheus: Prometheus, expression: str, wanted: float) -> bool:
    return [float(it["value"][1]) for it in prometheus.value(expression)] == [wanted]


def asked(expression: str) -> str:
    """As Grafana sends it."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@pytest.mark.parametrize("expression", TARGETS)
def test_each_panel_has_data_of_the_mount(scraped: Prometheus, expression: str):
    """What shows errors only is empty as long as there are none: its left side isn't."""
    query, is_filtered, _ = asked(expression).partition(" > 0")
    assert not is_filtered or not scraped.value(asked(expression))
    assert scraped.value(query)


def test_panels_say_what_was_done(scraped: Prometheus):
    panels = {panel["title"]: panel["targets"][0]["expr"] for panel in DASHBOARD["panels"]}
    for title, wanted in (("Newest committed step", 4), ("Store answers", 1), ("Under way", 0)):
        assert _is(scraped, asked(panels[title]), wanted), title
    by_phase = scraped.value(asked(panels["Duration of a save by phase (mean)"]))
    phases = {it["metric"]["phase"] for it in by_phase}
    assert phases == {"staging", "digest", "upload", "vote", "commit"}


def test_the_list_of_nodes_is_filled(scraped: Prometheus):
    (variable,) = [it for it in DASHBOARD["templating"]["list"] if it["name"] == "instance"]
    assert variable["query"]["query"] == "label_values(ckptgate_build_info, instance)"
    found = scraped.ask("label/instance/values", match_="ckptgate_build_info")
    assert len(found) == 1


def test_the_rules_are_loaded_and_none_fires_where_all_is_well(scraped: Prometheus):
    deadline = time.monotonic() + 60
    while True:
        (group,) = scraped.ask("rules")["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    # It takes this one ten minutes, where the kernel can't.
    firing = {rule["name"] for rule in group["rules"] if rule["state"] == "firing"}
    assert firing <= {"CkptgateSpoolDiskLow"}
