"""Which faults each kind of request can meet, and the client's patience in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.s3 import faults
from tests.s3.faults import Fault
from tests.s3.wire import Kind

from ckptgate_adapters.s3_store.location import S3Options

__all__ = ["FAULTS", "SENDS", "Case", "cases", "options"]

SENDS = frozenset({Kind.UPLOAD_PART, Kind.COMPLETE, Kind.PUT, Kind.DELETE_MANY})
"""Requests with a body."""
SAYS = frozenset({
    Kind.CREATE_UPLOAD, Kind.COMPLETE, Kind.GET, Kind.LIST, Kind.LIST_PARTS, Kind.LIST_UPLOADS,
    Kind.COPY, Kind.UPLOAD_PART_COPY, Kind.DELETE_MANY, Kind.ATTRIBUTES,
})  # fmt: skip
"""Requests whose reply has a body."""
CHANGES = frozenset({
    Kind.CREATE_UPLOAD, Kind.UPLOAD_PART, Kind.UPLOAD_PART_COPY, Kind.COMPLETE, Kind.ABORT,
    Kind.PUT, Kind.COPY, Kind.DELETE, Kind.DELETE_MANY,
})  # fmt: skip
IN_200 = frozenset({Kind.COMPLETE, Kind.COPY, Kind.UPLOAD_PART_COPY})
"""Requests that S3 may answer with status 200 and an error."""
EVERY = frozenset(Kind)


@dataclass(frozen=True)
class Case:
    """A fault, by name, and the kinds of requests that can meet it."""

    name: str
    fault: Fault
    kinds: frozenset[Kind]
    is_silent: bool = False
    """It shows the client something wrong, and nothing tells it so but its own checks."""


FAULTS: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("lost request", faults.drop_request, EVERY),
        Case("lost reply", faults.drop_reply, EVERY),
        Case("late request", faults.late, CHANGES),
        Case("late copy", faults.late_copy, CHANGES),
        Case("duplicate", faults.duplicate, CHANGES),
        Case("unheard duplicate", faults.duplicate_unheard, CHANGES),
        Case("reset in the request", faults.reset_request(), SENDS),
        Case("cut reply", faults.truncate_reply(), SAYS),
        Case("bit flip in the request", faults.flip_request(), SENDS, is_silent=True),
        Case("bit flip in the reply", faults.flip_reply(), SAYS, is_silent=True),
        Case("stalled request", faults.stall, EVERY),
        Case("stalled reply", faults.stall_after, CHANGES),
        Case("500 before", faults.error_before(500, "InternalError"), EVERY),
        Case("500 after", faults.error_after(500, "InternalError"), CHANGES),
        Case("503 before", faults.error_before(503, "SlowDown"), EVERY),
        Case("503 after", faults.error_after(503, "ServiceUnavailable"), CHANGES),
        Case("409 conflict", faults.error_before(409, "ConditionalRequestConflict"), CHANGES),
        Case("200 with an error before", faults.error_in_200(is_done=False), IN_200),
        Case("200 with an error after", faults.error_in_200(is_done=True), IN_200),
        Case("delay", faults.delay(0.2), EVERY),
    )
}


def cases(*kinds: Kind) -> list[tuple[Kind, Case]]:
    """All pairs of one of *kinds* and a fault that it can meet."""
    return [(kind, case) for kind in kinds for case in FAULTS.values() if kind in case.kinds]


def options(endpoint: str, **changes: object) -> S3Options:
    """Of a client that retries, but doesn't wait long."""
    words: dict[str, object] = {
        "endpoint_url": endpoint, "path_style": True, "part_bytes": 5 << 20, "stall_s": 1.0,
        "connect_timeout_s": 2.0, "retry_first_s": 0.01, "retry_max_s": 0.05, "tries_max": 3,
    }  # fmt: skip
    return S3Options(**{**words, **changes})  # type: ignore[arg-type]  # their types are those of the class
