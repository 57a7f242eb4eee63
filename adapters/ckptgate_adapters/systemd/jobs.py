"""What the service manager is about to do with this service: stop it, or restart it.

systemd sends the same signal for both; what tells them apart is the job that the unit has. Any
thread; each call runs `systemctl` once, for a few milliseconds.
"""

from __future__ import annotations

import logging
import subprocess
from typing import Final

__all__ = ["own_unit", "pending_job"]

_log = logging.getLogger(__name__)

_CGROUP: Final = "/proc/self/cgroup"
_TIMEOUT_S: Final = 5.0


def own_unit(cgroup: str | None = None) -> tuple[str, bool]:
    """The service that this process belongs to, "" for none; and whether it is a user's.

    Args:
        cgroup: text of /proc/self/cgroup, read if it is None.
    """
    if cgroup is None:
        try:
            with open(_CGROUP, encoding="utf-8", errors="surrogateescape") as stream:
                cgroup = stream.read()
        except OSError:
            return "", False
    path = next((line[3:] for line in cgroup.splitlines() if line.startswith("0::")), "")
    parts = path.split("/")
    # Below a service there may be groups that it made itself.
    units = [part for part in parts if part.endswith(".service")]
    is_users = any(part.startswith("user@") for part in parts)
    return (units[-1] if units else ""), is_users


def pending_job() -> str | None:
    """The type of the job that this service has now (`stop`, `restart`, ...), "" if it has none.

    None where the service manager doesn't say.
    """
    unit, is_users = own_unit()
    if not unit:
        return None
    command = ["systemctl", *(["--user"] if is_users else []), "list-jobs", "--no-legend", "--full"]
    try:
        done = _run(command)
        if done.returncode < 0:
            # A manager that ends all processes of the unit has ended that one, too.
            done = _run(command)
    except (OSError, subprocess.TimeoutExpired) as exc:
        _log.warning("jobs-not-told unit=%s error=%s", unit, exc)
        return None
    if done.returncode:
        _log.warning("jobs-not-told unit=%s error=%r", unit, done.stderr.strip())
        return None
    for line in done.stdout.splitlines():
        columns = line.split()
        if len(columns) >= 3 and columns[1] == unit:
            return columns[2]
    return ""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
