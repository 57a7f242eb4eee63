"""`s3://bucket/prefix` and the options: what is taken, what is refused, nothing secret shown."""

from __future__ import annotations

import pytest

from ckptgate.errors import ConfigError, InvalidNameError
from ckptgate_adapters.s3_store import S3Options, parse_s3_url


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3a://my.bucket-1/a/b c/é/", "my.bucket-1", "a/b c/é"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/ap/runs",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/ap",
            "runs",
        ),
    ],
)
def test_what_is_taken(url: str, bucket: str, prefix: str) -> None:
    location = parse_s3_url(url)
    assert (location.bucket, location.prefix) == (bucket, prefix)
    assert parse_s3_url(location.url) == location


@pytest.mark.parametrize(
    "url",
    [
        "bucket/prefix", "gs://bucket", "s3://", "s3://Bucket", "s3://b", "s3://bucket/a/../b",
        "s3://bucket/a//b", "s3://bucket/a?versionId=1", "s3://AKID:secret@bucket/x",
        f"s3://bucket/{'a' * 1025}", "s3://bucket/.",
    ],
)  # fmt: skip
def test_what_is_refused_with_the_reason(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_s3_url(url)
    assert "secret" not in f"{raised.value}{raised.value.hint}"


def test_keys_are_below_the_prefix_and_no_longer_than_s3_takes() -> None:
    location = parse_s3_url("s3://bucket/a/b")
    assert location.key("c/d") == "a/b/c/d"
    assert (location.key(""), location.below(""), location.below("c")) == ("a/b", "a/b/", "a/b/c/")
    assert location.path("a/b/c") == "c"
    assert parse_s3_url("s3://bucket").below("") == ""
    for path in ("../x", "a/./b", "/a", "x" * 250 + "/" + "/".join("y" * 250 for _ in range(4))):
        with pytest.raises(InvalidNameError):
            location.key(path)
    longest = "/".join([*["y" * 203] * 4, "z" * 204])
    assert len(location.key(longest)) == 1024
    with pytest.raises(InvalidNameError, match=r"'a/b/y+\.\.\.z+/' has 1025 bytes, S3 takes 1024"):
        location.directory_key(longest)


@pytest.mark.parametrize(
    "words",
    [
        {"part_bytes": 4 * 1024 * 1024},
        {"part_bytes": 6 * 1024**3},
        {"max_parallel": 0},
        {"parts_in_flight": -1},
        {"tries_max": 0},
        {"stall_s": 0.0},
        {"endpoint_url": "127.0.0.1:9000"},
        {"endpoint_url": "ftp://host"},
        {"endpoint_url": "https://AKID:secret@host"},
    ],
)
def test_options_out_of_range_are_refused_by_name(words: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as raised:
        S3Options(**words)  # type: ignore[arg-type]  # wrong on purpose
    assert raised.value.subject in words
    assert "secret" not in str(raised.value)
