"""Credentials that end while a store is in use, and come back as a new file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import give_credentials
from tests.s3.chaos import ChaosProxy
from tests.s3.faults import delay
from tests.s3.matrix import options
from tests.s3.servers import Bucket
from tests.s3.wire import Kind, Request

from ckptgate.errors import TransientStoreError
from ckptgate.ports.store import VerifyMode
from ckptgate.testing.samples import digested
from ckptgate_adapters.s3_store import S3Store, clients
from ckptgate_adapters.s3_store.failures import BadCredentialsError

Give = Callable[[str], None]


@pytest.fixture
def give(shared_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Write a credentials file with this secret."""
    give_credentials(shared_bucket.server, monkeypatch)
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(secret: str) -> None:
        key = shared_bucket.server.access_key
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        file.write_text(text)

    return write


@pytest.fixture
def store(shared_bucket: Bucket, proxy: ChaosProxy, prefix: str) -> Iterator[S3Store]:
    made = S3Store(f"{shared_bucket.url}/{prefix}", options(proxy.endpoint, stall_s=10.0))
    with contextlib.closing(made):
        yield made


def test_new_ones_are_taken_once_the_old_ones_are_refused(
    store: S3Store, give: Give, shared_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: whoever renews a file of credentials needn't mount anew."""
    give("not the one")
    with pytest.raises(BadCredentialsError):
        store.children("r")
    with pytest.raises(TransientStoreError, match="unknown whether"):
        store.create("r/0", b"first")
    give(shared_bucket.server.secret_key)
    with pytest.raises(BadCredentialsError):
        # They aren't looked for at each request.
        store.children("r")
    monkeypatch.setattr(clients, "_RENEW_S", 0.0)
    store.create("r/0", b"first")
    assert store.get("r/0") == b"first"


def test_what_is_under_way_ends_with_those_that_it_began_with(
    store: S3Store,
    give: Give,
    proxy: ChaosProxy,
    shared_bucket: Bucket,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I11."""
    monkeypatch.setattr(clients, "_RENEW_S", 0.0)
    give(shared_bucket.server.secret_key)
    (tmp_path / "f").write_bytes(b"x" * 1000)
    is_under_way = threading.Event()

    def is_data(request: Request) -> bool:
        is_data = request.key.endswith("/data")
        if is_data:
            is_under_way.set()
        return is_data

    proxy.rule(delay(1.0), Kind.PUT, where=is_data)
    with ThreadPoolExecutor(1) as pool:
        files = {"data": digested(str(tmp_path / "f"))}
        waiting = pool.submit(store.put_all, files, VerifyMode.READBACK)
        assert is_under_way.wait(20)
        held = store.session.run(_current(store))
        assert held.users
        held.is_refused = True
        assert store.children("none") == []
        assert store.session.run(_current(store)) is not held
        assert waiting.result(30) == {}
    assert shared_bucket.read(f"{prefix}/data") == b"x" * 1000
    assert held.users == 0


async def _current(store: S3Store) -> clients.Client:
    all_of_them = store.session.clients
    client = await all_of_them.take()
    await all_of_them.give_back(client)
    return client
