"""S3 over TLS: the service's certificate is checked, and large bodies go through as they are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import ipaddress
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.s3.servers import Bucket

from ckptgate.errors import UnusableError
from ckptgate.ports.store import VerifyMode
from ckptgate.testing.samples import digested
from ckptgate_adapters.s3_store import S3Options, S3Store

PART = 5 << 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One for 127.0.0.1 that nobody knows, and its key."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    base = tmp_path_factory.mktemp("tls")
    (base / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (base / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return base / "cert.pem", base / "key.pem"


@contextlib.contextmanager
def tls_in_front_of(port: int, certificate: tuple[Path, Path]) -> Iterator[str]:
    """The endpoint of a TLS server that passes all on to *port* of 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(pump(reader, back), pump(there, writer))
        finally:
            back.close()
            writer.close()
            tasks.discard(task)

    async def run(started: list[object], is_up: threading.Event) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        end = asyncio.Event()
        started += [server.sockets[0].getsockname()[1], asyncio.get_running_loop(), end]
        is_up.set()
        await end.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    started: list[object] = []
    is_up = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(run(started, is_up)))
    thread.start()
    assert is_up.wait(10)
    number, loop, end = started
    assert isinstance(loop, asyncio.AbstractEventLoop)
    assert isinstance(end, asyncio.Event)
    try:
        yield f"https://127.0.0.1:{number}"
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


def test_files_go_through_and_an_unknown_certificate_is_refused(
    mini_bucket: Bucket,
    certificate: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I1."""
    data = os.urandom(2 * PART + 7)
    (tmp_path / "f").write_bytes(data)
    with tls_in_front_of(mini_bucket.server.port, certificate) as endpoint:
        known = S3Options(endpoint_url=endpoint, part_bytes=PART, ca_bundle=str(certificate[0]))
        store = S3Store(mini_bucket.url, known)
        source = digested(str(tmp_path / "f"))
        assert store.put_all({"r/f": source}, VerifyMode.CHECKSUM) == {}
        with monkeypatch.context() as patched:
            # It is read directly.
            patched.setattr(store, "_read", lambda *_: pytest.fail("through the client"))
            assert store.read("r/f", PART - 3, 6) == data[PART - 3 : PART + 3]
            assert store.read("r/f", 0, len(data)) == data
        store.close()
        store = S3Store(mini_bucket.url, dataclasses.replace(known, ca_bundle=""))
        with pytest.raises(UnusableError, match="isn't trusted") as raised:
            store.probe()
        assert "ca_bundle" in raised.value.hint
        store.close()
    assert mini_bucket.read("r/f") == data
