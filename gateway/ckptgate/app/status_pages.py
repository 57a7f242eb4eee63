"""Which pages the daemon serves, and whom it tells of incidents, as the configuration says."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Final, Protocol

from ckptgate.app.build import Parts
from ckptgate.app.config import Config
from ckptgate.app.seeing import Seeing
from ckptgate.engine.event_tail import EventTail
from ckptgate.engine.events import EVENTS_FILE
from ckptgate_adapters.incident_hook import IncidentHook, Limiter
from ckptgate_adapters.status_page import Answer, Asked, StatusServer
from ckptgate_adapters.status_page.server import page_answer

__all__ = ["incident_hook", "pages_of", "serve_status"]

_log = logging.getLogger(__name__)

_PLACE_FILE: Final = "incidents.place"
"""In the spool: how far the incidents' command was told."""
_FOR_OTHERS: Final = ("/metrics", "/healthz", "/readyz")
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


class Closing(Protocol):
    """What is ended when the daemon ends."""

    def close(self) -> None: ...


class _Nothing:
    def close(self) -> None:
        """There is nothing to end."""


def pages_of(seeing: Seeing) -> dict[str, Callable[[Asked], Answer]]:
    """Each path's page."""
    page = page_answer()

    def status(asked: Asked) -> Answer:
        made = seeing.encoded(asked.tag)
        return Answer(body=made.body, content_type="application/json", tag=made.tag)

    def ready(_: Asked) -> Answer:
        problems = seeing.ready()
        code = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
        body = json.dumps({"ready": not problems, "problems": problems}).encode() + b"\n"
        return Answer(body=body, content_type="application/json", code=code)

    return {
        "/": lambda _: page,
        "/status.json": status,
        "/metrics": lambda _: Answer(body=seeing.metrics(), content_type=_PROMETHEUS),
        "/healthz": lambda _: Answer(body=b"ok\n"),
        "/readyz": ready,
    }


def serve_status(config: Config, seeing: Seeing) -> StatusServer:
    """Serve them; what can't be served is logged, and ends nothing."""
    server = StatusServer(pages_of(seeing), hosts=config.status.hosts, for_others=_FOR_OTHERS)
    try:
        server.listen_in(config.spool)
    except OSError as exc:
        _log.warning("status-not-served address=%s error=%s", config.spool, exc)

    def told(host: str, port: int) -> None:
        seeing.page = f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    if address := config.status.page_address:
        host, port = address
        server.listen_tcp(host, port, is_for_others=False, told=partial(told, host))
    if address := config.status.metrics_address:
        server.listen_tcp(*address, is_for_others=True, told=lambda _: None)
    return server


def incident_hook(parts: Parts) -> Closing:
    """Tell the configured command of incidents, from where it was last told."""
    config = parts.config
    section = config.incidents
    if not section.command:
        return _Nothing()
    hook = IncidentHook(
        EventTail(os.path.join(config.spool, EVENTS_FILE), os.path.join(config.spool, _PLACE_FILE)),
        command=section.command,
        timeout_s=section.timeout_s,
        limiter=Limiter(burst=section.burst, window_s=section.window_s),
        about={
            "host": socket.gethostname(),
            "member": parts.member,
            "mountpoint": config.mountpoint,
            "store": config.store,
        },
        meters=parts.meters,
    )
    hook.start()
    return hook
