"""The status page in a real browser (Debian: chromium): it fits, updates, and names are text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tests.browser.chromium import Tab, browser
from tests.reports import a_report, a_run, an_attempt, an_event

from ckptgate.engine.attempt_status import MemberStatus, RankStatus
from ckptgate_adapters.status_page import Answer, Asked, StatusServer
from ckptgate_adapters.status_page.server import page_answer

pytestmark = pytest.mark.full

HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\"'&amp; {{7*7}}"
LONG = "a" * 300
PHASES = {"staging": 12.0, "digest": 0.5, "upload": 40.0, "vote": 0.2, "commit": 1.5}


def a_rank(rank: int, **changes: Any) -> RankStatus:
    values: dict[str, Any] = {
        "rank": rank, "files": 2, "staged_bytes": 100 << 20, "digested_bytes": 80 << 20,
        "stored_bytes": 50 << 20, "committed": rank == 0, "voted": False,
    }  # fmt: skip
    return RankStatus(**{**values, **changes})


def a_save(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "state": "sealed", "name": "step-200", "size_bytes": 800 << 20,
        "digested_bytes": 640 << 20, "stored_bytes": 400 << 20, "rate_bytes_s": 12e6,
        "eta_s": 34.0, "ranks": tuple(map(a_rank, range(8))),
        "members": (
            MemberStatus(member="node1-1", voted=True), MemberStatus(member=LONG, voted=False),
        ),
        "missing": ("rank 3: optimizer.bin is missing",),
    }  # fmt: skip
    return an_attempt(**{**values, **changes})


def a_past(name: str, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "state": "committed", "name": name, "size_bytes": 3 << 30, "phases": PHASES,
        "committed_at": "2026-01-01T00:10:00.000Z",
    }  # fmt: skip
    return an_attempt(**{**values, **changes})


class World:
    """A server whose report is what a test says."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.asked: list[str] = []
        self.made: dict[str, Any] = {}
        self.server = StatusServer(
            {"/": lambda _: page_answer(), "/status.json": self._status}, hosts=(), for_others=()
        )
        self.url = ""
        self.server.listen_tcp("127.0.0.1", 0, is_for_others=False, told=self._told)
        self.say()

    def _told(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/"

    def _status(self, asked: Asked) -> Answer:
        self.asked.append(asked.tag)
        body = json.dumps(self.made).encode()
        return Answer(body=body, content_type="application/json", tag=f'"{hash(body)}"')

    def say(self, **report: Any) -> None:
        """Change the report."""
        self.made = {
            "schema": 1, "version": "0", "at": "2026-01-01T00:00:00.000Z", "store": "/nfs",
            "mountpoint": "/mnt/ckpts", "spool": "/spool", "member": "node1-1", "page": self.url,
            "contact": {"is_reached": True, "age_s": 1.0, "error": ""}, "passthrough": True,
            "disk": {"total": 1 << 40, "free": 1 << 39}, **a_report(**report).to_json(),
        }  # fmt: skip

    def show(self, **size: int) -> None:
        """Load the page, and wait until it shows something."""
        self.tab.go(self.url, **size)
        self.tab.until("document.getElementById('title') && "
                       "document.getElementById('title').textContent === '/mnt/ckpts'")  # fmt: skip

    def text(self, id_: str) -> str:
        return str(self.tab.look(f"document.getElementById('{id_}').innerText"))


@pytest.fixture(scope="module")
def tab(require, tmp_path_factory) -> Iterator[Tab]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    require(program, "chromium is not installed")
    with browser(str(program), tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def world(tab: Tab) -> Iterator[World]:
    made = World(tab)
    yield made
    made.server.close()


def busy(world: World) -> None:
    world.say(
        attempts=(
            a_past("step-100"), a_past("step-150", state="aborted", reason="not whole"), a_save(),
        ),
        runs=(a_run("run", pointers={"latest": "step-100"}),),
        events=(an_event("late-member", "run/step-150.0", "node2 came too late"),),
    )  # fmt: skip


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_and_tells_all(world: World, width: int):
    busy(world)
    world.show(width=width)
    now = world.text("now")
    for word in ("run/step-200", "sealed", "400.0 MiB of 800.0 MiB", "about 34 s left", "rank 7",
                 "rank 3: optimizer.bin is missing", "1 of 2 nodes have voted"):  # fmt: skip
        assert word in now
    past = world.text("past")
    assert past.index("step-150") < past.index("step-100")
    assert "upload 40 s" in past
    assert "took 54 s" in past
    incidents = world.text("incidents")
    assert "node2 came too late" in incidents
    assert "save again with all ranks" in incidents
    assert "latest → step-100" in world.text("runs")
    assert world.tab.look("document.documentElement.scrollWidth") <= width
    assert world.tab.complaints() == []


@pytest.mark.parametrize("width", [390, 1280])
def test_names_are_text_whatever_is_in_them(world: World, width: int):
    """I13."""
    world.say(
        attempts=(
            a_past(HOSTILE, reason=HOSTILE, state="aborted", missing=(HOSTILE,)),
            a_save(name=HOSTILE, run=LONG, reason=HOSTILE, missing=(HOSTILE, LONG),
                   members=(MemberStatus(member=HOSTILE, voted=False),)),
        ),
        runs=(a_run(HOSTILE, pointers={HOSTILE: HOSTILE}, quarantined={HOSTILE: HOSTILE}),),
        events=(an_event(HOSTILE, HOSTILE, HOSTILE),),
    )  # fmt: skip
    world.show(width=width)
    for id_ in ("now", "past", "runs", "incidents"):
        assert HOSTILE in world.text(id_), id_
    assert world.tab.look("typeof window.hacked") == "undefined"
    assert world.tab.look("document.querySelectorAll('main img, main script').length") == 0
    assert world.tab.look("document.documentElement.scrollWidth") <= width
    assert world.tab.complaints() == []


def test_it_shows_what_changes_without_being_loaded_again(world: World):
    world.say(attempts=(a_save(),))
    world.show()
    assert "None" in world.text("incidents")
    world.say(attempts=(a_past("step-200"),), events=(an_event(),))
    world.tab.until("document.getElementById('past').innerText.includes('step-200')")
    assert "Nothing is being saved" in world.text("now")
    assert "aborted" in world.text("incidents")
    # Then it asks with the tag of what it has.
    before = len(world.asked)
    world.tab.until("new Promise(done => setTimeout(() => done(true), 3500))")
    assert any(world.asked[before:])


def test_a_drain_and_what_is_left_of_its_time_are_shown(world: World):
    world.say()
    world.show(width=320)
    assert world.tab.look("document.getElementById('finishing').hidden")
    world.made["finishing"] = {"why": "drain", "refuses_new": True, "deadline": "", "left_s": 600}
    world.tab.until("!document.getElementById('finishing').hidden")
    assert world.text("finishing").startswith("draining: 10 min left for what is under way, no new")
    assert world.tab.look("document.documentElement.scrollWidth") <= 320
    world.say()
    world.tab.until("document.getElementById('finishing').hidden")


def test_a_daemon_that_is_gone_is_told_and_what_was_last_seen_stays(world: World):
    busy(world)
    world.show()
    world.server.close()
    world.tab.until("!document.getElementById('trouble').hidden")
    assert "does not answer" in world.text("trouble")
    assert "step-200" in world.text("now")


CONTRASTS = """
(() => {
  const parts = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(
      v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour) && colour !== "transparent") return parts(colour);
    }
    return [255, 255, 255];
  };
  let worst = 99;
  for (const node of document.querySelectorAll("h1, h2, h3, p, li, .badge, .dim")) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const own = light(parts(getComputedStyle(node).color));
    const [a, b] = [own, light(behind(node))].sort((x, y) => y - x);
    worst = Math.min(worst, (a + .05) / (b + .05));
  }
  return worst;
})()
"""


def test_it_can_be_read_in_the_dark_and_by_light(world: World):
    busy(world)
    backs: list[str] = []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        world.tab.call("Emulation.setEmulatedMedia", features=[feature])
        world.show()
        backs.append(str(world.tab.look("getComputedStyle(document.body).backgroundColor")))
        assert world.tab.look(CONTRASTS) >= 4.5, scheme
    assert backs[0] != backs[1]


def test_who_can_t_see_it_is_told_the_same(world: World):
    busy(world)
    world.show()
    nodes = world.tab.call("Accessibility.getFullAXTree")["nodes"]
    named: dict[str, list[str]] = {}
    for node in nodes:
        role = node.get("role", {}).get("value", "")
        named.setdefault(role, []).append(str(node.get("name", {}).get("value", "")))
    bars = named.get("progressbar", []) + named.get("ProgressIndicator", [])
    assert len(bars) == 9
    assert all("step-200" in name for name in bars)
    assert any("upload 40 s" in name for name in named["image"] + named.get("img", []))
    assert {"Under way", "Incidents", "Runs", "Checkpoints"} <= set(named["heading"])
    assert world.tab.look("document.documentElement.lang") == "en"
