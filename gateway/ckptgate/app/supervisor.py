"""The supervisor: holds the spool's lock and the kernel session, keeps both processes running.

It starts the mount and the publisher as children, starts them again when they die (the mount on the
same kernel session, so that open files and blocked calls go on), and ends when the file system is
unmounted. It may also go on where another supervisor was: one that has died (`keeping`), or one
that lets itself be replaced (`succession`). Until its own mount process serves then, all belongs to
the other one, and nothing is ended by its failure.

One thread; it never touches the mount itself, since a call into it could wait for a child that
isn't running.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from ckptgate.app.addresses import store_url
from ckptgate.app.children import SUCCEED, Child, only_one
from ckptgate.app.config import SESSION_FILE, Config, save_config
from ckptgate.app.keeping import Held, KeeperProcess, Keeping, Nobody, ServiceManager
from ckptgate.app.mountpoints import end_session, is_mounted, prepare_mountpoint
from ckptgate.app.registry import forget_mount, own_info, register_mount
from ckptgate.app.signals import stop_signals
from ckptgate.app.spool_ends import begin_spool, end_spool
from ckptgate.app.stopping import Stopping, is_all_stored
from ckptgate.app.succession import Door, Predecessor, Successor
from ckptgate.app.watching import Watching, probe_patiently
from ckptgate.errors import BusyError, RefusedError, UnusableError
from ckptgate_adapters.fuse.channel import MountOptions, mount
from ckptgate_adapters.sqlite_spool import SpoolLock, SqliteSpool
from ckptgate_adapters.systemd import has_manager
from ckptgate_adapters.systemd.jobs import own_unit, pending_job

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)

_RESTART_DELAY_S: Final = 0.2
_MOUNT_STOP_S: Final = 10.0


class Supervisor:
    """Runs one mount, from its beginning or from where another one was. Main thread only."""

    def __init__(
        self,
        config: Config,
        *,
        held: Held | None = None,
        predecessor: Predecessor | None = None,
        is_background: bool = False,
    ) -> None:
        """Prepare.

        Args:
            config: of the mount.
            held: what there is of the mount that goes on; None for a new one.
            predecessor: who lets it be replaced; then *held* is what it gave.
            is_background: nobody else starts it again.
        """
        self._config = config
        self._held = held
        self._predecessor = predecessor
        self._selector = selectors.DefaultSelector()
        self._lock = SpoolLock(config.spool, mountpoint=config.mountpoint)
        self._is_service = has_manager() and not is_background
        self._keeping: Keeping = Nobody()
        if self._is_service:
            self._keeping = ServiceManager()
        elif is_background:
            self._keeping = KeeperProcess(config, held.keeper if held else None)
        self._device = -1
        self._server = Child("mount", config)
        self._publisher = Child("publisher", config)
        self._door: Door | None = None
        self._successor: Successor | None = None
        self._watching = Watching(config, self._selector)
        self._stopping = Stopping(config)
        # Whether the mount goes on without this process: it isn't its own yet, or no more.
        self._is_left = held is not None

    def run(self, ready_fd: int | None) -> bool:
        """Mount, announce readiness on *ready_fd*, and return after the unmount.

        Or return where another one goes on with the mount.

        Args:
            ready_fd: None where nobody waits; else whoever does has just probed the store.

        Returns:
            Whether everything is in the store, or another one's to see to.

        Raises:
            CkptError: it could not be mounted, or taken over; all is as it was.
        """
        if self._held is None:
            self._prepare(ready_fd)
        with stop_signals() as signal_fd:
            self._begin()
            try:
                self._supervise(signal_fd, ready_fd)
            finally:
                self._end()
        return self._is_left or is_all_stored(self._config.spool)

    def _prepare(self, ready_fd: int | None) -> None:
        """What comes before a new mount."""
        config = self._config
        if ready_fd is None:
            probe_patiently(config)
        prepare_mountpoint(config.mountpoint)
        SqliteSpool.create_or_open(
            config.spool,
            store_url=store_url(config.store, config.s3.endpoint_url),
            host=os.uname().nodename,
        ).close()

    def _begin(self) -> None:
        """Have the lock and the kernel session."""
        config = self._config
        if self._held is not None:
            self._lock.adopt(self._held.lock)
            self._device = self._held.device
            return
        self._lock.acquire()
        try:
            # What is left of a supervisor that was killed must not go on in this spool.
            with only_one(config.spool, "mount"), only_one(config.spool, "publisher"):
                begin_spool(config.spool)
            save_config(config)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(config.spool, SESSION_FILE))
            self._device = mount(config.mountpoint, MountOptions(fsname=config.store))
        except BaseException:
            self._lock.release()
            raise

    def _end(self) -> None:
        """Give back what `_begin` took."""
        if self._is_left:
            self._lock.leave()
            os.close(self._device)
            return
        mountpoint = self._config.mountpoint
        self._keeping.end()
        forget_mount(mountpoint, self._config.spool)
        # Nobody serves it any more: while the device is open, a look at it waits for ever.
        os.close(self._device)
        if is_mounted(mountpoint):
            end_session(mountpoint)
        spool = self._config.spool
        # A child of a killed supervisor may be there, if nobody has taken its place yet.
        with only_one(spool, "mount"), only_one(spool, "publisher"):
            end_spool(spool)
        self._lock.release()

    def _supervise(self, signal_fd: int, ready_fd: int | None) -> None:
        config = self._config
        self._server = Child("mount", config, pass_fds=(self._device,))
        self._publisher = Child("publisher", config)
        is_new = not self._is_left
        try:
            if is_new:
                # Both take their time to start.
                self._start_publisher()
            self._start_mount()
            self._become()
            if not is_new:
                self._start_publisher()
            self._watch(signal_fd, lambda: self._on_signal(signal_fd))
            self._announce(ready_fd)
            self._watching.start()
            while self._one_event():
                pass
        finally:
            self._watching.stop()
            if not self._is_left:
                self._stop_children()

    def _stop_children(self) -> None:
        if not self._server.stop(SUCCEED, _MOUNT_STOP_S):
            _log.error("child-killed name=mount after_s=%g", _MOUNT_STOP_S)
        limit_s = self._stopping.publisher_limit_s()
        if not self._publisher.stop(signal.SIGTERM, limit_s):
            _log.error("child-killed name=publisher after_s=%g", limit_s)

    def _start_publisher(self) -> None:
        """Start the publisher; nobody waits for it."""
        is_kept = int(self._keeping.is_kept)
        self._watch_child(self._publisher, self._publisher.start(str(is_kept)))

    def _start_mount(self) -> None:
        """Start the mount process and wait until it serves.

        Raises:
            UnusableError: it didn't.
        """
        is_kept = int(self._keeping.is_kept)
        pidfd = self._server.start_ready(str(self._device), str(is_kept))
        self._watch_child(self._server, pidfd)

    def _start_mount_again(self) -> None:
        """As `_start_mount`, but one that dies while it starts is started again, too."""
        while True:
            try:
                self._start_mount()
            except UnusableError as exc:
                if self._server.is_worn_out:
                    raise
                _log.error("mount-not-ready error=%s: starting it again", exc)
                time.sleep(_RESTART_DELAY_S)
            else:
                return

    def _become(self) -> None:
        """From now on the mount is this process's."""
        config = self._config
        self._keeping.begin(self._device, self._lock.fd)
        self._watch_keeper()
        self._lock.declare()
        save_config(config)
        register_mount(
            own_info(mountpoint=config.mountpoint, store=config.store, spool=config.spool)
        )
        self._is_left = False
        if self._predecessor is not None:
            self._predecessor.taken()
            self._predecessor = None
        self._open_door()

    def _open_door(self) -> None:
        """Let the next supervisor ask."""
        if self._door is not None:
            self._unwatch(self._door.fileno())
            self._door.close()
        self._door = door = Door(self._config.spool)
        self._watch(door.fileno(), lambda: self._on_request(door))

    def _announce(self, ready_fd: int | None) -> None:
        config = self._config
        if self._held is None:
            _log.info("mounted store=%s mountpoint=%s", config.store, config.mountpoint)
        else:
            _log.info("taken-over store=%s mountpoint=%s", config.store, config.mountpoint)
        if ready_fd is not None:
            os.write(ready_fd, json.dumps({"ready": True}).encode() + b"\n")
            os.close(ready_fd)

    def _watch(self, fd: int, act: Callable[[], bool]) -> None:
        """Have *act* called when *fd* is readable; it says whether the mount goes on here."""
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def _watch_child(self, child: Child, pidfd: int) -> None:
        self._watch(pidfd, lambda: self._on_end(child, pidfd))

    def _watch_keeper(self) -> None:
        connection = self._keeping.connection()
        if connection is not None:
            self._watch(connection.fileno(), lambda: self._on_keeper(connection))

    def _one_event(self) -> bool:
        """Handle what happened; False when the mount has ended, or goes on elsewhere."""
        # One at a time: what is done about it may change what is watched.
        events = self._selector.select(self._pause_s())[:1]
        for key, _ in events:
            if key.data is self._watching:
                self._watching.on_readable((self._server.process, self._publisher.process))
            elif not key.data():
                return False
        if self._successor is not None and not events:
            self._successor.kill_if_late()
        if self._stopping.is_due_to_unmount():
            self._watching.stop()
            self._stopping.unmount()
        return not self._stopping.is_over()

    def _pause_s(self) -> float | None:
        """How long to wait for something to happen; None: as long as nothing does."""
        return self._stopping.pause_s if self._successor is None else self._successor.pause_s

    def _on_end(self, child: Child, pidfd: int) -> bool:
        """A child has ended."""
        self._unwatch(pidfd)
        os.close(pidfd)
        code = child.process.wait() if child.process else 0
        if self._successor is not None:
            # The successor's takes its place.
            return True
        return self._replace(child, code)

    def _replace(self, child: Child, code: int) -> bool:
        """Start a child again; False if the mount is over."""
        if child is self._server and code == 0:
            return False
        _log.error("child-died name=%s code=%s: starting it again", child.name, code)
        time.sleep(_RESTART_DELAY_S)
        if child is self._server:
            self._start_mount_again()
        else:
            self._start_publisher()
        return True

    def _on_keeper(self, connection: socket.socket) -> bool:
        """The keeper has died."""
        self._unwatch(connection.fileno())
        _log.error("keeper-died: starting another one")
        time.sleep(_RESTART_DELAY_S)
        self._keeping.begin(self._device, self._lock.fd)
        self._watch_keeper()
        return True

    def _on_request(self, door: Door) -> bool:
        """Somebody wants to be the next supervisor."""
        successor = door.let_in(self._give, self._config)
        if successor is not None:
            self._successor = successor
            self._watch(successor.fileno(), lambda: self._on_successor(successor))
        return True

    def _give(self) -> Held:
        """What a successor gets.

        Raises:
            RefusedError: somebody else starts this process, and would start it again.
            BusyError: there is a successor already, or the mount is about to end.
        """
        mountpoint = self._config.mountpoint
        if self._is_service:
            msg = f"a service manager runs the mount {mountpoint}"
            hint = f"systemctl restart {own_unit()[0] or 'its unit'}"
            raise RefusedError(msg, subject=mountpoint, hint=hint)
        if not self._keeping.is_kept:
            msg = f"the mount {mountpoint} runs in the foreground: who started it would lose it"
            hint = f"ckptgate umount {mountpoint}, and mount without --foreground"
            raise RefusedError(msg, subject=mountpoint, hint=hint)
        if self._successor is not None or self._stopping.has_begun:
            what = "about to end" if self._stopping.has_begun else "being replaced already"
            msg = f"the mount {mountpoint} is {what}"
            raise BusyError(msg, subject=mountpoint, hint="ckptgate status")
        return Held(device=self._device, lock=self._lock.fd, keeper=self._keeping.connection())

    def _on_successor(self, successor: Successor) -> bool:
        """It has taken over, or died."""
        self._unwatch(successor.fileno())
        if successor.end():
            _log.info("replaced mountpoint=%s", self._config.mountpoint)
            self._is_left = True
            return False
        _log.error("replacement-failed mountpoint=%s: going on", self._config.mountpoint)
        self._successor = None
        # It may have died just before its last word.
        self._unwatch_keeper()
        self._become()
        for child in (self._server, self._publisher):
            code = child.code
            if code is not None and not self._replace(child, code):
                return False
        if successor.is_hurried:
            self._stopping.signalled()
        return True

    def _unwatch_keeper(self) -> None:
        connection = self._keeping.connection()
        if connection is not None:
            with contextlib.suppress(KeyError):
                self._unwatch(connection.fileno())

    def _on_signal(self, signal_fd: int) -> bool:
        """Finish what is under way, and stop; or leave the mount to who is started next."""
        with contextlib.suppress(BlockingIOError):
            os.read(signal_fd, 64)
        if self._successor is not None:
            # Whoever has the mount then ends it.
            self._successor.hurry()
            return True
        if self._is_service and not self._stopping.has_begun:
            job = pending_job()
            # Where it can't be told, nothing is unmounted below processes that go on.
            if job is None or job == "restart":
                _log.info("left-for-restart mountpoint=%s job=%s", self._config.mountpoint, job)
                self._is_left = True
                return False
        self._stopping.signalled()
        return True
