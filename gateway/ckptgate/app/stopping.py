"""The end of a gateway by a signal: what is under way is finished before the unmount.

Owns the rules of preemption. From the signal on no checkpoint is begun (`[stop] new_checkpoints`),
and what is begun is staged, sealed and published as long as the budget lasts and waiting can help.
A second signal ends the waiting. Then the mount goes, with files open in it or not, and what is
left is named; the next start goes on with it. Supervisor's thread only; nothing waits for longer
than a question to the publisher.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Final

from ckptgate.app.config import Config
from ckptgate.app.left import forget_left, named, read_left
from ckptgate.errors import CkptError
from ckptgate_adapters.channels import control_call
from ckptgate_adapters.fuse.channel import unmount
from ckptgate_adapters.systemd import notify

__all__ = ["Stopping", "is_all_stored"]

_log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.25
_ANSWER_S: Final = 5.0
_LAST_S: Final = 5.0
"""For the publisher, and for who still has files open, after the unmount; however late it is."""
_MARGIN_S: Final = 15.0
"""For the publisher's last request, beyond its budget."""
_MANAGER_MARGIN_S: Final = 60.0
_NAMES_SHOWN: Final = 8


class Stopping:
    """From the first signal to the end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._deadline: float | None = None
        self._looked_at = 0.0
        self._is_cut = False
        self._is_away = False
        self._is_unmounted = False
        self._publisher_s: float | None = None

    @property
    def pause_s(self) -> float | None:
        """How long to wait for something to happen; None: as long as nothing does."""
        return None if self._deadline is None else _PAUSE_S

    @property
    def has_begun(self) -> bool:
        """Whether the mount is about to end."""
        return self._deadline is not None

    def signalled(self) -> None:
        """SIGTERM or SIGINT: begin; a second one cuts the waiting short."""
        if self._deadline is not None:
            self._is_cut = True
            return
        config = self._config
        forget_left(config.spool)
        notify("STOPPING=1", "STATUS=finishing what is under way")
        self._deadline = time.monotonic() + config.stop.timeout_s
        refuses = config.stop.new_checkpoints == "refuse"
        answer = self._ask({"op": "hold", "refuses": refuses, "why": "stop"})
        if answer is not None:
            # Somebody may have said before how long the end may take.
            self._deadline = time.monotonic() + float(answer["timeout_s"])
        _log.info(
            "stopping mountpoint=%s budget_s=%.0f refuses_new=%s",
            config.mountpoint, self._left_s(), refuses,
        )  # fmt: skip

    def _left_s(self) -> float:
        """What is left of the budget."""
        return 0.0 if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def is_due_to_unmount(self) -> bool:
        """Whether it is time to unmount: nothing is left, nothing moves, or the budget is used."""
        if self._deadline is None or self._is_unmounted:
            return False
        if self._is_cut or not self._left_s():
            return True
        if time.monotonic() - self._looked_at < _PAUSE_S:
            return False
        self._looked_at = time.monotonic()
        answer = self._ask({"op": "left"})
        if answer is None:
            # It is being started again, or waits for the store.
            return False
        left: list[dict[str, Any]] = answer["left"]
        self._is_away = bool(answer["is_away"])
        names = ", ".join(sorted({named(row) for row in left})[:_NAMES_SHOWN])
        self._tell(f"finishing {names}" if left else "everything is in the store", self._left_s())
        return not (left and answer["is_moving"])

    @staticmethod
    def _tell(status: str, more_s: float) -> None:
        extended_s = more_s + _MANAGER_MARGIN_S
        notify(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(extended_s * 1e6)}")

    def unmount(self) -> None:
        """Unmount; the mount process ends by it, and then everything else."""
        is_vain = self._is_cut or self._is_away
        rest_s = _LAST_S if is_vain else max(self._left_s(), _LAST_S)
        self._publisher_s = rest_s
        self._ask({"op": "drain", "timeout_s": rest_s})
        self._tell("unmounting", rest_s)
        self._is_unmounted = True
        self._deadline = time.monotonic() + rest_s
        try:
            unmount(self._config.mountpoint, lazy=False)
        except OSError:
            with contextlib.suppress(OSError):
                unmount(self._config.mountpoint, lazy=True)

    def is_over(self) -> bool:
        """Whether those who still have files open in the mount have had their time."""
        return self._is_unmounted and not self._left_s()

    def publisher_limit_s(self) -> float:
        """How long the publisher's own end may take."""
        if self._publisher_s is None:
            answer = self._ask({"op": "budget"})
            self._publisher_s = (
                self._config.stop.timeout_s if answer is None else float(answer["timeout_s"])
            )
        self._tell("publishing what is sealed", self._publisher_s)
        return self._publisher_s + _MARGIN_S

    def _ask(self, request: dict[str, Any]) -> Any:
        try:
            return control_call(self._config.spool, request, timeout_s=_ANSWER_S)
        except CkptError as exc:
            _log.info("publisher-silent op=%s error=%s", request["op"], exc)
            return None


def is_all_stored(spool: str) -> bool:
    """Whether the publisher said at its end that nothing is left; the manager is told what is."""
    try:
        left = read_left(spool)
    except (OSError, ValueError):
        return False
    if left:
        names = ", ".join(named(row) for row in left[:_NAMES_SHOWN])
        notify(f"STATUS={len(left)} unfinished, the next start goes on with them: {names}")
    return not left
