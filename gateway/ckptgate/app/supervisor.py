"""The supervisor: holds the spool's lock and the kernel session, keeps both processes running.

It starts the mount and the publisher as children, starts them again when they die (the mount on the
same kernel session, so that open files and blocked calls go on), and ends when the file system is
unmounted. One thread; it never touches the mount itself, since a call into it could wait for a
child that isn't running.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Final

from ckptgate.app.addresses import store_url
from ckptgate.app.config import Config, save_config
from ckptgate.app.mountpoints import end_session, is_mounted, prepare_mountpoint
from ckptgate.app.registry import MountInfo, forget_mount, process_start, register_mount
from ckptgate.app.stopping import Stopping, is_all_stored
from ckptgate.app.watching import Watching, probe_patiently
from ckptgate.engine.events import EVENTS_FILE, Events
from ckptgate.engine.hosts import note_host
from ckptgate.engine.powerloss import begin_boot, end_clean
from ckptgate.errors import CkptError, UnusableError
from ckptgate.ports.rows import STOP_META
from ckptgate_adapters.fuse.channel import MountOptions, mount
from ckptgate_adapters.metrics.mapped import open_meters
from ckptgate_adapters.sqlite_spool import SpoolLock, SqliteSpool
from ckptgate_adapters.system_clock import SystemClock

__all__ = ["SESSION_FILE", "Supervisor"]

_log = logging.getLogger(__name__)

SESSION_FILE: Final = "session.state"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_RESTART_DELAY_S: Final = 0.2
_RESTARTS_MAX: Final = 20
_RESTART_WINDOW_S: Final = 60.0
_READY_TIMEOUT_S: Final = 30.0


def _boot_id() -> str:
    """Of the running kernel; "" where there is none."""
    try:
        with open(_BOOT_ID, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _ignore(number: int, frame: object) -> None:
    """A signal handler: the wake-up descriptor tells the loop."""
    del number, frame


class _Child:
    """One of the two processes, started again when it dies."""

    def __init__(self, name: str, config: Config, pass_fds: tuple[int, ...]) -> None:
        self.name = name
        self._config = config
        self._pass_fds = pass_fds
        self._starts: list[float] = []
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, extra_fds: tuple[int, ...] = ()) -> int:
        """Start it; returns a pidfd that becomes readable when it ends."""
        now = time.monotonic()
        self._starts = [at for at in self._starts if now - at < _RESTART_WINDOW_S] + [now]
        if self.is_worn_out:
            msg = f"the {self.name} process died {_RESTARTS_MAX} times in {_RESTART_WINDOW_S:g} s"
            raise UnusableError(msg, subject=self.name, hint="see <spool>/ckptgate.log")
        command = [sys.executable, "-m", "ckptgate.app.child", self.name]
        command += [self._config.spool, str(os.getpid())]
        self.process = subprocess.Popen(
            [*command, *arguments],
            pass_fds=(*self._pass_fds, *extra_fds),
            stdin=subprocess.DEVNULL,
        )
        return os.pidfd_open(self.process.pid)

    @property
    def is_worn_out(self) -> bool:
        """Whether it died too often to be started once more."""
        return len(self._starts) > _RESTARTS_MAX

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, wait, and SIGKILL only if it doesn't end."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.error("child-killed name=%s after_s=%g", self.name, timeout_s)
            self.process.kill()
            self.process.wait()


class Supervisor:
    """Runs one mount from its beginning to its end. Main thread only."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._watching = Watching(config, self._selector)
        self._stopping = Stopping(config)

    def run(self, ready_fd: int | None) -> bool:
        """Mount, announce readiness on *ready_fd*, and return after the unmount.

        Args:
            ready_fd: None where nobody waits; else whoever does has just probed the store.

        Returns:
            Whether everything is in the store.

        Raises:
            CkptError: it could not be mounted; nothing was left behind.
        """
        config = self._config
        if ready_fd is None:
            probe_patiently(config)
        prepare_mountpoint(config.mountpoint)
        SqliteSpool.create_or_open(
            config.spool,
            store_url=store_url(config.store, config.s3.endpoint_url),
            host=os.uname().nodename,
        ).close()
        with SpoolLock(config.spool, mountpoint=config.mountpoint), self._signals() as signal_fd:
            self._open_spool()
            save_config(config)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(config.spool, SESSION_FILE))
            device = mount(config.mountpoint, MountOptions(fsname=config.store))
            try:
                self._supervise(device, signal_fd, ready_fd)
            finally:
                forget_mount(config.mountpoint)
                # Nobody serves it any more: while the device is open, a look at it waits for ever.
                os.close(device)
                if is_mounted(config.mountpoint):
                    end_session(config.mountpoint)
                self._close_spool()
        return is_all_stored(config.spool)

    def _open_spool(self) -> None:
        """See to what a power loss or a crash left in the spool; nobody else has it open now."""
        spool = SqliteSpool.attach(self._config.spool)
        with contextlib.closing(spool):
            path = os.path.join(self._config.spool, EVENTS_FILE)
            meters = open_meters(self._config.spool, "supervisor")
            events = Events(path, clock=SystemClock(), meters=meters)
            note_host(spool, os.uname().nodename, events)
            begin_boot(spool, _boot_id(), events)
            spool.drop_meta(STOP_META)
            spool.clear_handles()
            spool.drop_orphans()

    def _close_spool(self) -> None:
        """Nobody uses it any more: have everything on disk, or leave it to the next start."""
        try:
            with contextlib.closing(SqliteSpool.attach(self._config.spool)) as spool:
                end_clean(spool)
        except (CkptError, OSError) as exc:
            _log.warning("spool-not-synced spool=%s error=%s", self._config.spool, exc)

    @contextlib.contextmanager
    def _signals(self) -> Generator[int]:
        """SIGTERM and SIGINT make the yielded descriptor readable."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(-1)
            os.close(reader)
            os.close(writer)

    def _supervise(self, device: int, signal_fd: int, ready_fd: int | None) -> None:
        publisher = _Child("publisher", self._config, ())
        server = _Child("mount", self._config, (device,))
        try:
            self._selector.register(publisher.start(), selectors.EVENT_READ, publisher)
            self._start_mount(server, device)
            self._selector.register(signal_fd, selectors.EVENT_READ, None)
            self._announce(ready_fd)
            self._watching.start()
            while self._one_event(server, publisher, device):
                pass
        finally:
            self._watching.stop()
            server.stop(10)
            publisher.stop(self._stopping.publisher_limit_s())

    def _start_mount(self, server: _Child, device: int) -> None:
        """Start the mount process and wait until it serves.

        Raises:
            UnusableError: it didn't.
        """
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pidfd = server.start(str(device), str(writer), extra_fds=(writer,))
        finally:
            os.close(writer)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(reader, selectors.EVENT_READ)
                is_ready = selector.select(_READY_TIMEOUT_S) and os.read(reader, 1) == b"r"
        finally:
            os.close(reader)
        if not is_ready:
            os.close(pidfd)
            server.stop(0)
            msg = f"the mount process did not get ready on {self._config.mountpoint}"
            hint = "see <spool>/ckptgate.log"
            raise UnusableError(msg, subject=self._config.mountpoint, hint=hint)
        self._selector.register(pidfd, selectors.EVENT_READ, server)

    def _start_mount_again(self, server: _Child, device: int) -> None:
        """As `_start_mount`, but one that dies while it starts is started again, too."""
        while True:
            try:
                self._start_mount(server, device)
            except UnusableError as exc:
                if server.is_worn_out:
                    raise
                _log.error("mount-not-ready error=%s: starting it again", exc)
                time.sleep(_RESTART_DELAY_S)
            else:
                return

    def _announce(self, ready_fd: int | None) -> None:
        start = process_start(os.getpid())
        info = MountInfo(
            mountpoint=self._config.mountpoint,
            store=self._config.store,
            spool=self._config.spool,
            pid=os.getpid(),
            start=0 if start is None else start,
        )
        register_mount(info)
        _log.info("mounted store=%s mountpoint=%s", info.store, info.mountpoint)
        if ready_fd is not None:
            os.write(ready_fd, json.dumps({"ready": True}).encode() + b"\n")
            os.close(ready_fd)

    def _one_event(self, server: _Child, publisher: _Child, device: int) -> bool:
        """Handle what happened; False when the mount has ended."""
        for key, _ in self._selector.select(self._stopping.pause_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 64)
                self._stopping.signalled()
                continue
            if key.data is self._watching:
                self._watching.on_readable((server.process, publisher.process))
                continue
            child: _Child = key.data
            self._selector.unregister(key.fd)
            os.close(key.fd)
            code = child.process.wait() if child.process else 0
            if child is server and code == 0:
                return False
            _log.error("child-died name=%s code=%s: starting it again", child.name, code)
            time.sleep(_RESTART_DELAY_S)
            if child is server:
                self._start_mount_again(server, device)
            else:
                self._selector.register(publisher.start(), selectors.EVENT_READ, publisher)
        if self._stopping.is_due_to_unmount():
            self._watching.stop()
            self._stopping.unmount()
        return not self._stopping.is_over()
