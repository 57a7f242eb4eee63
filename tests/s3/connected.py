"""S3 stores for many tests on one connection and bucket: making these costs more than most tests.

A store's own session is made for its URL as always; only the client below it is shared, and each
store has a prefix of its own.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.s3.servers import Bucket, Server

from ckptgate_adapters.s3_store import S3Options, S3Store
from ckptgate_adapters.s3_store.session import Session

__all__ = ["Connected", "connected"]


class Connected:
    """Stores in one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._endpoint = bucket.server.endpoint
        self._first = S3Store(bucket.url, S3Options(endpoint_url=self._endpoint, path_style=True))
        self._first.session.run(self._first.session.call("head_bucket"))

    def place(self) -> str:
        """A URL that nobody else has."""
        return f"{self.bucket.url}/{uuid.uuid4().hex[:8]}/team a"

    def store(self, url: str, **options: Any) -> S3Store:
        """A store that is a client of its own in all but the connection."""
        given = S3Options(endpoint_url=self._endpoint, path_style=True, **options)
        made = S3Store(url, given)
        self.join(made.session)
        return made

    def join(self, session: Session) -> None:
        """Give it the connection."""
        session._connected = self._first.session._here()

    def close(self) -> None:
        self._first.close()


@contextmanager
def connected(server: Server) -> Iterator[Connected]:
    """A new bucket and one connection to it, both gone at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        bucket = Bucket.make(server)
        made = Connected(bucket)
        yield made
        made.close()
        bucket.destroy()
