"""Ranges of objects on the caller's own thread, as plain HTTP: the fast way to read much.

A range that goes as it should costs a quarter of the CPU that it costs through the client, whose
bytes pass through the loop's thread and are copied three times; and threads read side by side. It
does the good case only: whatever isn't exactly what was asked for is left to the client, which
knows what answers mean and when to ask again. Any thread.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import ssl
import threading
import time
import urllib.parse
import urllib.request
import weakref
from collections import deque
from typing import Final

from ckptgate_adapters.s3_store.remembered import Remembered
from ckptgate_adapters.s3_store.session import Session

__all__ = ["DirectReader"]

_URL_S: Final = 900
_URL_FRESH_S: Final = 300.0
_URLS_MAX: Final = 4096
_FAILURES_MAX: Final = 3
_PAUSE_S: Final = 60.0
_IDLE_S: Final = 5.0
_ANSWERS: Final = frozenset({404, 412, 416})
"""Nothing is wrong with the way then: the client will be told the same."""
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]+)-([0-9]+)/[0-9]+")

_log = logging.getLogger(__name__)


class DirectReader:
    """Reads ranges, or says that it can't.

    Args:
        session: signs the URLs; its options say where the service is.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._urls: Remembered[tuple[str, float]] = Remembered(_URLS_MAX)
        self._idle: deque[tuple[http.client.HTTPConnection, float]] = deque()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._failures = 0
        self._paused_until = 0.0
        self._context: ssl.SSLContext | None = None
        self._is_closed = False
        # At the latest when it is collected, as the session's own connections.
        weakref.finalize(self, _close_all, self._idle)

    def read(self, key: str, offset: int, length: int, etag: str) -> tuple[bytes, str] | None:
        """The bytes of a range that is in the object, and its ETag; None: ask the client.

        Args:
            key: the object's.
            offset: where the range begins.
            length: its bytes, at least one.
            etag: of the version to read, "" for any.
        """
        if self._is_closed or time.monotonic() < self._paused_until:
            return None
        try:
            url = urllib.parse.urlsplit(self._url(key))
            found = self._ask(url, offset, length, etag)
        except (OSError, http.client.HTTPException) as exc:
            # Its text may have the URL, which is as good as a key.
            _log.debug("s3-direct-read-failed key=%s error=%s", key, type(exc).__name__)
            self._urls.forget(key)
            self._count_failure()
            return None
        if found is not None:
            self._failures = 0
        return found

    def close(self) -> None:
        """Close the connections that nobody uses; the others go when they are given back."""
        self._is_closed = True
        _close_all(self._idle)

    def _ask(
        self, url: urllib.parse.SplitResult, offset: int, length: int, etag: str
    ) -> tuple[bytes, str] | None:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        if etag:
            headers["If-Match"] = etag
        connection = self._connection(url)
        if connection is None:
            return None
        is_reusable = False
        try:
            connection.request("GET", f"{url.path}?{url.query}", headers=headers)
            answer = connection.getresponse()
            if answer.status in _ANSWERS:
                return None
            data = answer.read(length + 1)
            _check(answer, offset, length, data)
            is_reusable = answer.isclosed() and not answer.will_close
            return data, answer.headers.get("ETag", "")
        finally:
            if is_reusable and not self._is_closed:
                self._idle.append((connection, time.monotonic()))
            else:
                connection.close()

    def _connection(self, url: urllib.parse.SplitResult) -> http.client.HTTPConnection | None:
        """One that is open, or a new one; None where a proxy is in the way."""
        if self._pid != os.getpid():
            self._forget_parent()
        with contextlib.suppress(IndexError):
            while True:
                connection, since = self._idle.pop()
                if time.monotonic() - since < _IDLE_S:
                    return connection
                connection.close()
        host = url.hostname or ""
        if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
            return None
        stall_s = self._session.options.stall_s
        if url.scheme == "http":
            return http.client.HTTPConnection(host, url.port, timeout=stall_s)
        with self._lock:
            if self._context is None:
                bundle = self._session.options.ca_bundle or os.environ.get("AWS_CA_BUNDLE")
                self._context = ssl.create_default_context(cafile=bundle or None)
        return http.client.HTTPSConnection(host, url.port, timeout=stall_s, context=self._context)

    def _forget_parent(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._urls = Remembered(_URLS_MAX)
        self.close()
        self._is_closed = False

    def _url(self, key: str) -> str:
        """Signed a while ago at most: credentials change."""
        known = self._urls.get(key)
        now = time.monotonic()
        if known is not None and known[1] > now:
            return known[0]
        url = self._session.run(self._session.signed_url(key, _URL_S))
        self._urls.keep(key, (url, now + _URL_FRESH_S))
        return url

    def _count_failure(self) -> None:
        """Leave it be for a while where it doesn't work, so that not all is asked twice."""
        self._failures += 1
        if self._failures >= _FAILURES_MAX:
            self._failures = 0
            self._paused_until = time.monotonic() + _PAUSE_S


def _close_all(idle: deque[tuple[http.client.HTTPConnection, float]]) -> None:
    while idle:
        with contextlib.suppress(IndexError):
            idle.pop()[0].close()


def _check(answer: http.client.HTTPResponse, offset: int, length: int, data: bytes) -> None:
    """Refuse an answer that isn't the range, or not all of it."""
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if answer.status != http.client.PARTIAL_CONTENT or match is None:
        raise http.client.HTTPException(f"status {answer.status} for a range")
    first, last = int(match.group(1)), int(match.group(2))
    if first != offset or len(data) != last - first + 1 or len(data) > length:
        raise http.client.HTTPException(f"{len(data)} bytes of {match.group()} for {offset}")
