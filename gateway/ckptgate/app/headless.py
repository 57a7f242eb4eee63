"""A daemon without a mount: serves a spool to the clients of `ckpt://` on this machine.

It is as the mount's supervisor, without a kernel session: the same spool, lock and publisher, with
a child that serves the socket in the place of the one that serves the kernel. It ends by a signal,
or when nobody used it for a while and nothing is left to be published. Main thread only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import time
from typing import Final

from ckptgate.app.addresses import store_url
from ckptgate.app.children import Child, only_one
from ckptgate.app.client_process import STOPPED
from ckptgate.app.config import Config, save_config
from ckptgate.app.left import forget_left
from ckptgate.app.registry import forget_mount, own_info, register_mount
from ckptgate.app.signals import stop_signals
from ckptgate.app.spool_ends import begin_spool, end_spool
from ckptgate.app.stopping import Stopping, is_all_stored
from ckptgate.app.stores import probe_store
from ckptgate.errors import UnusableError
from ckptgate_adapters.sqlite_spool import SpoolLock, SqliteSpool

__all__ = ["Headless"]

_log = logging.getLogger(__name__)

_RESTART_DELAY_S: Final = 0.2
_SERVER_STOP_S: Final = 10.0


class Headless:
    """Runs one daemon without a mount from its beginning to its end."""

    def __init__(self, config: Config, *, idle_exit_s: float) -> None:
        """Prepare.

        Args:
            config: with "" as its mount point.
            idle_exit_s: without clients and work for so long it ends; 0: never.
        """
        self._config = config
        self._idle_exit_s = idle_exit_s
        self._selector = selectors.DefaultSelector()
        self._server = Child("clients", config)
        self._publisher = Child("publisher", config)

    def serve(self, ready_fd: int | None) -> bool:
        """Serve, announce readiness on *ready_fd*, and return at the end.

        Returns:
            Whether everything is in the store.

        Raises:
            CkptError: it could not begin; nothing was left behind.
        """
        config = self._config
        probe_store(config)
        SqliteSpool.create_or_open(
            config.spool,
            store_url=store_url(config.store, config.s3.endpoint_url),
            host=os.uname().nodename,
        ).close()
        with SpoolLock(config.spool), stop_signals() as signal_fd, self._selector:
            # What is left of a supervisor that was killed must not go on in this spool.
            with only_one(config.spool, "mount"), only_one(config.spool, "publisher"):
                begin_spool(config.spool)
            save_config(config)
            try:
                self._tend(signal_fd, ready_fd)
            finally:
                forget_mount(config.mountpoint, config.spool)
                end_spool(config.spool)
        return is_all_stored(config.spool)

    def _tend(self, signal_fd: int, ready_fd: int | None) -> None:
        try:
            self._watch(self._publisher, self._publisher.start("0"))
            self._watch(self._server, self._started())
            self._selector.register(signal_fd, selectors.EVENT_READ, None)
            self._announce(ready_fd)
            while self._one_event():
                pass
        finally:
            self._server.stop(signal.SIGTERM, _SERVER_STOP_S)
            forget_left(self._config.spool)
            limit_s = Stopping(self._config).publisher_limit_s()
            if not self._publisher.stop(signal.SIGTERM, limit_s):
                _log.error("child-killed name=publisher after_s=%g", limit_s)

    def _watch(self, child: Child, pidfd: int) -> None:
        self._selector.register(pidfd, selectors.EVENT_READ, child)

    def _started(self) -> int:
        return self._server.start_ready(str(self._idle_exit_s))

    def _announce(self, ready_fd: int | None) -> None:
        config = self._config
        register_mount(own_info(mountpoint="", store=config.store, spool=config.spool))
        _log.info("serving store=%s spool=%s", config.store, config.spool)
        if ready_fd is not None:
            os.write(ready_fd, json.dumps({"ready": True}).encode() + b"\n")
            os.close(ready_fd)

    def _one_event(self) -> bool:
        """Handle what happened; False when this is the end."""
        for key, _ in self._selector.select()[:1]:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 64)
                _log.info("stopping spool=%s", self._config.spool)
                return False
            child: Child = key.data
            self._selector.unregister(key.fd)
            os.close(key.fd)
            code = child.process.wait() if child.process else 0
            if child is self._server and code == STOPPED:
                _log.info("nobody-needs-it spool=%s", self._config.spool)
                return False
            _log.error("child-died name=%s code=%s: starting it again", child.name, code)
            time.sleep(_RESTART_DELAY_S)
            is_server = child is self._server
            self._watch(child, self._started_again() if is_server else child.start("0"))
        return True

    def _started_again(self) -> int:
        """As `_started`, but one that dies while it starts is started again, too."""
        while True:
            try:
                return self._started()
            except UnusableError as exc:
                if self._server.is_worn_out:
                    raise
                _log.error("server-not-ready error=%s: starting it again", exc)
                time.sleep(_RESTART_DELAY_S)
