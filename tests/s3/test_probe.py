"""The start-up probe on S3: what is wrong is said by name, with a remedy, before anything else."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.s3.chaos import ALWAYS, ChaosProxy, chaos
from tests.s3.faults import answer, edit_reply, edit_request, error_before
from tests.s3.servers import Bucket, Server
from tests.s3.wire import Kind, Reply

from ckptgate.errors import CkptError, ConfigError, FormatVersionError, UnusableError
from ckptgate_adapters.s3_store import S3Options, S3Store

Make = Callable[..., S3Store]


@pytest.fixture
def proxy(mini: Server) -> Iterator[ChaosProxy]:
    with chaos(mini.port) as made:
        yield made


@pytest.fixture
def make(mini_bucket: Bucket, proxy: ChaosProxy) -> Iterator[Make]:
    """A store on ministack, through the proxy; closed at the end.

    On SeaweedFS two writers that race take a second.
    """
    with contextlib.ExitStack() as stack:

        def made(url: str = "", **options: Any) -> S3Store:
            words = {"endpoint_url": proxy.endpoint, "retry_first_s": 0.01, "tries_max": 3}
            store = S3Store(url or f"{mini_bucket.url}/pre", S3Options(**{**words, **options}))
            stack.callback(store.close)
            return store

        yield made


@pytest.fixture
def seaweed_options(bucket: Bucket) -> dict[str, Any]:
    """For a store on SeaweedFS; the environment has its credentials."""
    return {"endpoint_url": bucket.server.endpoint, "tries_max": 3}


def _refusal(store: S3Store) -> CkptError:
    with pytest.raises(UnusableError) as raised:
        store.probe()
    return raised.value


def test_a_good_bucket_passes_and_nothing_is_left(
    make: Make, bucket: Bucket, seaweed_options: dict[str, Any]
) -> None:
    bucket.put("pre/.ckptgate/probe-now", b"")
    make(f"{bucket.url}/pre", **seaweed_options).probe()
    make(bucket.url, **seaweed_options, single_writer=True).probe()
    assert bucket.keys() == ["pre/.ckptgate/probe-now"]
    assert bucket.uploads() == []


def test_a_permission_that_is_missing_is_named(make: Make, proxy: ChaosProxy) -> None:
    store = make()
    for kind, permission in {
        Kind.PUT: "s3:PutObject",
        Kind.GET: "s3:GetObject",
        Kind.HEAD: "s3:GetObject and s3:ListBucket",
        Kind.LIST: "s3:ListBucket",
        Kind.DELETE: "s3:DeleteObject",
        Kind.CREATE_UPLOAD: "s3:PutObject",
        Kind.LIST_UPLOADS: "s3:ListBucketMultipartUploads",
        Kind.LIST_PARTS: "s3:ListMultipartUploadParts",
        Kind.ABORT: "s3:AbortMultipartUpload",
    }.items():
        proxy.clear()
        proxy.rule(error_before(403, "AccessDenied"), kind, times=ALWAYS)
        refusal = _refusal(store)
        assert f"aren't allowed: {permission}" in str(refusal)
        assert permission in refusal.hint
    proxy.clear()
    proxy.rule(error_before(403, "AccessDenied"), Kind.DELETE, Kind.ABORT, times=ALWAYS)
    assert "s3:AbortMultipartUpload, s3:DeleteObject" in str(_refusal(store))


def test_wrong_credentials_are_told_from_missing_permissions_and_never_shown(
    make: Make,
    bucket: Bucket,
    seaweed_options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "ckptgate_adapters")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-one")
    refusal = _refusal(make(bucket.url, **seaweed_options))
    assert "SignatureDoesNotMatch" in str(refusal)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKNOBODY")
    assert "InvalidAccessKeyId" in str(_refusal(make(bucket.url, **seaweed_options)))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refusal = _refusal(make(bucket.url, **seaweed_options))
    assert "credentials" in str(refusal)
    assert "environment" in refusal.hint
    assert "unknown-profile" in str(
        _refusal(make(bucket.url, **seaweed_options, profile="unknown-profile"))
    )
    shown = f"{caplog.text}{refusal!r}{refusal.hint}"
    assert "not-the-right-one" not in shown


def test_a_store_that_ignores_the_condition_is_refused_and_a_single_writer_may_use_it(
    make: Make, proxy: ChaosProxy, mini_bucket: Bucket
) -> None:
    """I2: two nodes would overwrite each other's decisions."""
    # ministack checks no signatures, so that the header can be taken away.
    proxy.rule(
        edit_request(lambda request: request.without("if-none-match")), Kind.PUT, times=ALWAYS
    )
    refusal = _refusal(make())
    assert "put-if-absent" in str(refusal)
    assert "single-writer" in refusal.hint
    store = make(single_writer=True)
    store.probe()
    store.create("a", b"1")
    store.create("a", b"1")
    with pytest.raises(CkptError, match="other bytes"):
        store.create("a", b"2")
    assert mini_bucket.keys() == ["pre/a"]


def test_a_store_that_refuses_the_condition_has_the_same_remedy(
    make: Make, proxy: ChaosProxy
) -> None:
    proxy.rule(
        error_before(501, "NotImplemented"),
        Kind.PUT,
        times=ALWAYS,
        where=lambda request: "if-none-match" in request.headers,
    )
    refusal = _refusal(make())
    assert "put-if-absent" in str(refusal)
    assert "single-writer" in refusal.hint
    make(single_writer=True).probe()


def test_a_bucket_that_is_not_there_and_an_endpoint_that_does_not_answer(make: Make) -> None:
    refusal = _refusal(make("s3://there-is-no-such-bucket"))
    assert "there is no bucket 'there-is-no-such-bucket'" in str(refusal)
    refusal = _refusal(make(endpoint_url="http://127.0.0.1:9"))
    assert "can't be reached" in str(refusal)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint_url": "http://my_host:9000"}, "Invalid endpoint: http://my_host:9000"),
        ({"endpoint_url": "http://[::1"}, "Invalid IPv6 URL"),
        ({"endpoint_url": "http://127.0.0.1:99999"}, "not a valid URI"),
        ({"region": "us east"}, "us east"),
        ({"ca_bundle": "/no/such.pem"}, "'/no/such.pem' is not there"),
    ],
)
def test_what_the_client_cannot_work_with_is_told(
    make: Make, options: dict[str, str], said: str
) -> None:
    """I13."""
    with pytest.raises((ConfigError, UnusableError)) as raised:
        make(**options).probe()
    assert said in str(raised.value)
    assert raised.value.hint


def test_a_prefix_that_leaves_no_room_for_keys_is_refused(make: Make, mini_bucket: Bucket) -> None:
    """I13: at the mount, not at the first save."""
    prefix = "/".join(["p" * 200] * 2)
    assert "401 bytes, at most 400" in str(_refusal(make(f"{mini_bucket.url}/{prefix}")))


def test_an_endpoint_that_is_not_s3_is_told(make: Make) -> None:
    pages = [(200, b"<html>hello</html>"), (200, b"{}"), (200, b"<br>"), (404, b"<html>no</html>")]

    class Web(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(pages[0][0])
            self.send_header("Content-Length", str(len(pages[0][1])))
            self.end_headers()
            self.wfile.write(pages[0][1])

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            store = make(endpoint_url=f"http://127.0.0.1:{server.server_port}", tries_max=1)
            while pages:
                assert "doesn't answer as an S3 service" in str(_refusal(store))
                del pages[0]
        finally:
            server.shutdown()
            thread.join()


def test_a_clock_that_is_off_is_told_with_how_much(make: Make, proxy: ChaosProxy) -> None:
    date = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=2)).strftime(
        "%a, %d %b %Y %H:%M:%S GMT"
    )
    body = b"<Error><Code>RequestTimeTooSkewed</Code><Message>too large</Message></Error>"
    proxy.rule(answer(Reply(403, (("Date", date),)).with_body(body)), Kind.LIST, times=ALWAYS)
    refusal = _refusal(make())
    assert "this machine's clock is +7" in str(refusal)
    assert refusal.hint == "timedatectl"


def test_another_format_version_is_refused(make: Make, mini_bucket: Bucket) -> None:
    mini_bucket.put("pre/.ckptgate/format.json", b'{"format":99}\n')
    with pytest.raises(FormatVersionError):
        make().probe()


def test_versions_do_not_matter_and_are_told(
    make: Make, bucket: Bucket, seaweed_options: dict[str, Any]
) -> None:
    bucket.client.put_bucket_versioning(
        Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
    )
    store = make(bucket.url, **seaweed_options)
    store.probe()
    assert "keeps versions" in " ".join(store.warnings)
    store.create("a", b"1")
    assert store.get("a") == b"1"


def test_a_bucket_that_locks_objects_is_told(make: Make, proxy: ChaosProxy) -> None:
    def locked(reply: Reply) -> Reply:
        until = "2026-12-02T00:00:00.000Z"
        return reply.with_headers(
            x_amz_object_lock_mode="COMPLIANCE", x_amz_object_lock_retain_until_date=until
        )

    proxy.rule(edit_reply(locked), Kind.HEAD, times=ALWAYS)
    store = make()
    store.probe()
    assert "locks objects: nothing can be reclaimed before 2026-12-02" in " ".join(store.warnings)


def test_a_rule_that_aborts_uploads_is_told(make: Make, proxy: ChaosProxy) -> None:
    def with_rule(reply: Reply) -> Reply:
        date = "Wed, 02 Dec 2026 00:00:00 GMT"
        return reply.with_headers(x_amz_abort_date=date, x_amz_abort_rule_id="clean")

    proxy.rule(edit_reply(with_rule), Kind.CREATE_UPLOAD, times=ALWAYS)
    store = make()
    store.probe()
    assert "'clean' aborts uploads" in " ".join(store.warnings)
