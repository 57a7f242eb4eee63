"""`ckptgate mount --replace`: go on with a running mount, by the code of this process.

Owns the rule that all that can be refused is refused before the running one is asked for anything:
nothing is mounted there, it is another mount, or its state is of a release that this one can't go
on from.
"""

from __future__ import annotations

from ckptgate.app.config import Config, read_saved_config
from ckptgate.app.keeping import check_readable
from ckptgate.app.registry import MountInfo, find_mount
from ckptgate.app.succession import Predecessor, check_same
from ckptgate.app.supervisor import Supervisor
from ckptgate.errors import MissingError

__all__ = ["check_replaceable", "running_config", "successor"]


def _running(mountpoint: str) -> MountInfo:
    found = find_mount(mountpoint)
    if found is None or found.mountpoint != mountpoint:
        msg = f"nothing to replace: no ckptgate serves {mountpoint}"
        raise MissingError(msg, subject=mountpoint, hint=f"ckptgate mount STORE {mountpoint}")
    return found


def running_config(mountpoint: str) -> Config:
    """The configuration of the mount that is served there.

    Raises:
        MissingError: none is.
        ConfigError: another release wrote it, and this one doesn't know it.
    """
    return read_saved_config(_running(mountpoint).spool)


def check_replaceable(config: Config) -> None:
    """Whether this release can go on with the running mount as *config* says.

    Raises:
        CkptError: it can't; the message says why.
    """
    running = _running(config.mountpoint)
    check_same(read_saved_config(running.spool), config)
    check_readable(running.spool)


def successor(config: Config) -> Supervisor:
    """A supervisor that goes on where the present one is.

    Raises:
        CkptError: it can't, or the present one refuses.
    """
    check_replaceable(config)
    predecessor = Predecessor(config)
    return Supervisor(config, held=predecessor.held, predecessor=predecessor, is_background=True)
