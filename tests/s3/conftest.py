"""For tests of many faults: a bucket and a chaos proxy that a module shares, a prefix for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conftest import give_credentials
from tests.s3.chaos import ChaosProxy, chaos
from tests.s3.matrix import options
from tests.s3.servers import Bucket, Server

from ckptgate_adapters.s3_store import S3Store


@pytest.fixture(scope="module")
def shared_bucket(seaweed: Server) -> Iterator[Bucket]:
    """A bucket of the module: making one for each test would take most of the time."""
    made = Bucket.make(seaweed)
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def shared_proxy(seaweed: Server) -> Iterator[ChaosProxy]:
    with chaos(seaweed.port) as made:
        yield made


@pytest.fixture
def proxy(shared_proxy: ChaosProxy) -> Iterator[ChaosProxy]:
    """The module's proxy to SeaweedFS, without rules."""
    shared_proxy.clear()
    yield shared_proxy
    shared_proxy.clear()


@pytest.fixture(scope="module")
def shared_store(shared_bucket: Bucket, shared_proxy: ChaosProxy) -> Iterator[S3Store]:
    """A store that is the whole bucket, through the proxy: to connect takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        give_credentials(shared_bucket.server, patch)
        made = S3Store(shared_bucket.url, options(shared_proxy.endpoint))
        # The credentials are read at the first request.
        made.children("")
        yield made
        made.close()


@pytest.fixture
def prefix(shared_bucket: Bucket) -> str:
    """A prefix in `shared_bucket` of this test alone."""
    shared_bucket.prefixes += 1
    return f"p{shared_bucket.prefixes}"
