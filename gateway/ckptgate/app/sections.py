"""The sections of the configuration file: strict values, each of which checks itself. Pure."""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec

from ckptgate.app.units import parse_bytes, parse_listen, parse_seconds
from ckptgate.model.kinds import DEFAULT_PATTERNS, NamePatterns

__all__ = [
    "CommitSection",
    "IncidentsSection",
    "LogSection",
    "NamesSection",
    "ReclaimSection",
    "RoomSection",
    "S3Section",
    "StatusSection",
    "StopSection",
    "Strict",
]

SPOOL_BYTES_MIN: Final = 1 << 20
STOP_POLICIES: Final = ("refuse", "allow")
STOP_TIMEOUT_MAX_S: Final = 7 * 86400


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: unknown keys are errors."""


class CommitSection(Strict, frozen=True, kw_only=True):
    """`[commit]`: how long things may take. All in seconds.

    Attributes:
        deadline_s: from the SEAL to the ABORT of what isn't whole.
        quiescence_s: without a write, before an attempt without a commit event may be sealed.
        abandon_after_s: without a live writer and without a SEAL, until an attempt is given up.
        survivor_delay_s: until other nodes finish what a silent node left undecided.
        live_interval_s: between copies of a live file that grows.
        idle_interval_s: between looks at the log when nothing is under way.
        resume_wait_s: at most, a new job waits for sealed attempts that can still commit.
        decision_wait_s: at most, a write into an attempt that is being decided waits.
    """

    deadline_s: float = 600.0
    quiescence_s: float = 30.0
    abandon_after_s: float = 900.0
    survivor_delay_s: float = 5.0
    live_interval_s: float = 2.0
    idle_interval_s: float = 2.0
    resume_wait_s: float = 60.0
    decision_wait_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                msg = f"commit.{name} is negative"
                raise ValueError(msg)


class NamesSection(Strict, frozen=True, kw_only=True):
    """`[names]`: shell patterns of names with a meaning; each replaces the default list."""

    checkpoints: tuple[str, ...] = DEFAULT_PATTERNS.checkpoints
    temporaries: tuple[str, ...] = DEFAULT_PATTERNS.temporaries
    pointers: tuple[str, ...] = DEFAULT_PATTERNS.pointers
    whole_suffixes: tuple[str, ...] = DEFAULT_PATTERNS.whole_suffixes

    def patterns(self) -> NamePatterns:
        """As the model wants them."""
        return NamePatterns(
            checkpoints=self.checkpoints,
            temporaries=self.temporaries,
            pointers=self.pointers,
            whole_suffixes=self.whole_suffixes,
        )


class RoomSection(Strict, frozen=True, kw_only=True):
    """`[room]`: how full the spool's disk may get, as shares of it that are free.

    Attributes:
        free_min_share: below it, local copies of published checkpoints are given up; 0 for never.
        free_target_share: until so much is free again.
        spool_max: how much the spool itself may take (`500GiB`), "" for as much as there is: above
            it the same copies are given up, and where none is left new files are refused.
        wait_s: seconds that a checkpoint's first file waits at most for the room that the run's
            previous checkpoint took.
    """

    free_min_share: float = 0.25
    free_target_share: float = 0.4
    spool_max: str = ""
    wait_s: float = 60.0

    @property
    def spool_max_bytes(self) -> int:
        """Bytes, 0 for no limit."""
        return parse_bytes(self.spool_max) if self.spool_max else 0

    def __post_init__(self) -> None:
        if self.spool_max and self.spool_max_bytes < SPOOL_BYTES_MIN:
            msg = f"room.spool_max is less than {SPOOL_BYTES_MIN} bytes"
            raise ValueError(msg)
        if self.wait_s < 0:
            msg = "room.wait_s is negative"
            raise ValueError(msg)
        for name in ("free_min_share", "free_target_share"):
            if not 0 <= getattr(self, name) < 1:
                msg = f"room.{name} is not in 0 <= x < 1"
                raise ValueError(msg)
        if self.free_min_share > self.free_target_share:
            msg = "room.free_min_share is more than room.free_target_share"
            raise ValueError(msg)


class ReclaimSection(Strict, frozen=True, kw_only=True):
    """`[reclaim]`: how long what is dead is kept, as durations (`24h`, `7d`, `forever`).

    Attributes:
        grace: what is replaced, deleted, aborted, or was never finished.
        keep_aborted: in the spool, the files of what was aborted or abandoned; at least the grace.
        lost_after: an attempt that nobody sealed and that nothing comes to any more is aborted.
    """

    grace: str = "24h"
    keep_aborted: str = "7d"
    lost_after: str = "7d"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            try:
                parse_seconds(getattr(self, name))
            except ValueError as exc:
                msg = f"reclaim.{name}: {exc}"
                raise ValueError(msg) from exc


class StopSection(Strict, frozen=True, kw_only=True):
    """`[stop]`: what SIGTERM to the daemon means, as when its node is taken away.

    Attributes:
        new_checkpoints: `refuse` (EROFS) or `allow`, from the signal on.
        timeout_s: seconds that what is under way may take to be finished and published.
    """

    new_checkpoints: str = "refuse"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.new_checkpoints not in STOP_POLICIES:
            msg = f"stop.new_checkpoints is not one of {', '.join(STOP_POLICIES)}"
            raise ValueError(msg)
        if not 0 <= self.timeout_s <= STOP_TIMEOUT_MAX_S:
            msg = f"stop.timeout_s is not in 0 <= x <= {STOP_TIMEOUT_MAX_S}"
            raise ValueError(msg)


class LogSection(Strict, frozen=True, kw_only=True):
    """`[log]`: how the daemon's log looks; how much of it there is says `log_level`.

    Attributes:
        format: `text` (`key=value`) or `json`, an object a line.
    """

    format: str = "text"

    def __post_init__(self) -> None:
        if self.format not in {"text", "json"}:
            msg = f"log.format is {self.format!r}, not text or json"
            raise ValueError(msg)


class IncidentsSection(Strict, frozen=True, kw_only=True):
    """`[incidents]`: whom to tell.

    Attributes:
        command: program (an absolute path) and arguments, run for each incident with the incident
            as JSON on its standard input; () for none.
        timeout_s: after which it is killed.
        burst: runs for one kind within a window; the rest becomes one summary.
        window_s: how long a window is.
    """

    command: tuple[str, ...] = ()
    timeout_s: float = 10.0
    burst: int = 5
    window_s: float = 60.0

    def __post_init__(self) -> None:
        if self.command and not self.command[0].startswith("/"):
            msg = "incidents.command does not begin with an absolute path"
            raise ValueError(msg)
        if any("\0" in word for word in self.command):
            msg = "incidents.command has a null byte in it"
            raise ValueError(msg)
        for name in ("timeout_s", "burst", "window_s"):
            if getattr(self, name) <= 0:
                msg = f"incidents.{name} is not above 0"
                raise ValueError(msg)


class StatusSection(Strict, frozen=True, kw_only=True):
    """`[status]`: where the status page and the metrics are, beside `<spool>/status.sock`.

    Attributes:
        listen: `127.0.0.1:9469`, `[::1]:9469`: page and metrics, for this machine; "" for nowhere.
        metrics_listen: `10.0.0.5:9469`: metrics and health alone, for others; "" for nowhere.
        hosts: names that may stand in a request's Host beside addresses, `localhost` and the
            machine's own name.
    """

    listen: str = ""
    metrics_listen: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def page_address(self) -> tuple[str, int] | None:
        """Host and port of `listen`."""
        return parse_listen(self.listen) if self.listen else None

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of `metrics_listen`."""
        return parse_listen(self.metrics_listen) if self.metrics_listen else None

    def __post_init__(self) -> None:
        for name in ("listen", "metrics_listen"):
            if value := getattr(self, name):
                try:
                    host, _ = parse_listen(value)
                except ValueError as exc:
                    msg = f"status.{name}: {exc}"
                    raise ValueError(msg) from exc
                if name == "listen" and not ipaddress.ip_address(host).is_loopback:
                    msg = f"status.listen is {value!r}: the page is for this machine only"
                    raise ValueError(msg)


class S3Section(Strict, frozen=True, kw_only=True):
    """`[s3]`: how a store `s3://bucket/prefix` is spoken to.

    Credentials are no part of it: they come from where boto looks for them (environment, profile,
    instance), so nothing in here is secret.

    Attributes:
        endpoint_url: of the service; "" is AWS, or what the profile says.
        profile: of the AWS configuration; "" is the default one.
        region: of the bucket; "" is what the environment or the profile says.
        path_style: the bucket stands in the path; with an `endpoint_url` it does anyway.
        anonymous: requests aren't signed.
        ca_bundle: file of certificates to trust; "" is the system's.
        single_writer: nobody else writes there, so a service without put-if-absent will do.
        plain_copy: after each COMMIT the service copies the files to their plain names.
        part_size: of an upload's parts, where 10,000 of them are enough.
        parts_in_flight: parts that are read or sent at a time.
        parallel: requests in flight.
        stall_s: seconds without any progress until a request is given up.
        tries_max: of a request, the first one included.
    """

    endpoint_url: str = ""
    profile: str = ""
    region: str = ""
    path_style: bool = False
    anonymous: bool = False
    ca_bundle: str = ""
    single_writer: bool = False
    plain_copy: bool = False
    part_size: str = "16MiB"
    parts_in_flight: int = 8
    parallel: int = 32
    stall_s: float = 60.0
    tries_max: int = 6

    @property
    def part_bytes(self) -> int:
        """Bytes of a part."""
        return parse_bytes(self.part_size)

    def __post_init__(self) -> None:
        authority = self.endpoint_url.partition("://")[2].partition("/")[0]
        if "@" in authority:
            msg = "s3.endpoint_url has credentials in it"
            raise ValueError(msg)
        try:
            parse_bytes(self.part_size)
        except ValueError as exc:
            msg = f"s3.part_size: {exc}"
            raise ValueError(msg) from exc
