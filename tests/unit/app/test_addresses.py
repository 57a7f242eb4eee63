"""What STORE and PATH arguments name, and that no credentials are taken from or shown of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptgate.app.addresses import below, joined, split_address, store_address, store_url
from ckptgate.app.cli import main
from ckptgate.app.config import (
    ConfigFile,
    load_config_file,
    make_config,
    read_saved_config,
    s3_options,
    save_config,
)
from ckptgate.app.sections import S3Section
from ckptgate.app.stores import open_store
from ckptgate.errors import ConfigError, ExitCode, UsageError

SECRET = "wJalrXUtnFEMI"


def test_store_arguments(tmp_path: Path):
    assert store_address(str(tmp_path)) == str(tmp_path)
    assert store_address(f"file://{tmp_path}") == str(tmp_path)
    assert store_address(f"file://{tmp_path}/a%20b") == f"{tmp_path}/a b"
    for bad in ("file://host/x", "http://x", "gs://bucket/x"):
        with pytest.raises(UsageError):
            store_address(bad)


@pytest.mark.parametrize(
    ("argument", "address"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3a://bucket/a", "s3://bucket/a"),
        ("s3://bucket/user@host/run", "s3://bucket/user@host/run"),
    ],
)
def test_a_bucket_has_one_address(argument: str, address: str):
    assert store_address(argument) == address


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA0:{SECRET}@bucket/prefix",
        f"s3://AKIA0:{SECRET}/more@bucket/prefix",
        f"s3a://{SECRET}@bucket",
        f"https://AKIA0:{SECRET}@host/bucket",
    ],
)
@pytest.mark.parametrize("command", [["mount", "URL", "/m"], ["ls", "URL"], ["status", "URL/run"]])
def test_credentials_in_a_url_are_refused_and_not_shown(url: str, command: list[str], capsys):
    assert main([url if word == "URL" else word.replace("URL", url) for word in command]) == 64
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    assert "://..." in shown.err or "credentials" in shown.err


def test_credentials_in_an_endpoint_or_a_file_are_refused_and_not_shown(tmp_path: Path, capsys):
    endpoint = f"https://AKIA0:{SECRET}@host"
    words = ["mount", "s3://bucket/x", str(tmp_path / "m"), "--endpoint-url", endpoint]
    assert main(words) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert "endpoint_url has credentials in it" in shown.err
    assert SECRET not in shown.out + shown.err
    path = tmp_path / "c.toml"
    for text in (f'[s3]\nendpoint_url = "{endpoint}"', f'[s3]\nsecret_access_key = "{SECRET}"'):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config_file(str(path))
        assert SECRET not in caught.value.message


def test_places_below_a_store():
    assert split_address("s3://b/x/run/step-1") == ("s3://b/x/run", "step-1")
    assert split_address("s3://b/run") == ("s3://b", "run")
    assert split_address("s3://b") == ("s3://b", "")
    assert split_address("/a/b") == ("/a", "b")
    assert joined("s3://b/x/run", "../step-1") == "s3://b/x/step-1"
    assert joined("/m", ".") == "/m"
    assert below("s3://b/x/run", "s3://b/x") == "run"
    assert below("s3://b/x", "s3://b/x") == ""
    assert below("s3://b/xy", "s3://b/x") is None
    assert below("s3://b/x", "s3://b") == "x"


def test_a_spool_belongs_to_a_bucket_of_one_service(tmp_path: Path):
    """A bucket's name means another store at another endpoint."""
    assert store_url("/a b", "http://h") == "file:///a%20b"
    assert store_url("s3://b/x", "") == "s3://b/x"
    assert store_url("s3://b/x", "http://h:1/") == "http://h:1/b/x"

    def spool(endpoint: str) -> str:
        s3 = S3Section(endpoint_url=endpoint)
        mountpoint = str(tmp_path / "m")
        return make_config(
            ConfigFile(), store="s3://bucket/x", mountpoint=mountpoint, spool="", s3=s3
        ).spool

    assert len({spool(""), spool("http://h:1"), spool("http://h:2")}) == 3
    assert spool("http://h:1/") == spool("http://h:1")


def test_arguments_win_over_the_file_and_that_over_the_environment():
    environ = {
        "AWS_ENDPOINT_URL": "http://general",
        "AWS_ENDPOINT_URL_S3": "http://of-s3",
        "AWS_DEFAULT_REGION": "of-boto",
        "AWS_REGION": "of-others",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    file = S3Section(endpoint_url="http://file", region="file")
    found = s3_options(file, environ, endpoint_url="http://argument", region="argument")
    assert (found.endpoint_url, found.region) == ("http://argument", "argument")
    found = s3_options(file, environ)
    assert (found.endpoint_url, found.region) == ("http://file", "file")
    found = s3_options(S3Section(), environ)
    assert (found.endpoint_url, found.region) == ("http://of-s3", "of-boto")
    assert SECRET not in repr(found)
    ignoring = environ | {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    assert s3_options(S3Section(), ignoring).endpoint_url == ""
    # A profile that is named has a region of its own.
    assert s3_options(S3Section(), environ, profile="work").region == ""


def test_what_a_mount_is_configured_with_is_kept_without_secrets(tmp_path: Path):
    s3 = s3_options(S3Section(plain_copy=True), {"AWS_SECRET_ACCESS_KEY": SECRET}, region="r")
    config = make_config(
        ConfigFile(verify="checksum"),
        store="s3://bucket",
        mountpoint="/m",
        spool=str(tmp_path),
        s3=s3,
    )
    save_config(config)
    assert read_saved_config(str(tmp_path)) == config
    assert SECRET not in (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text('{"of": "another release"}')
    with pytest.raises(ConfigError, match="not of this release"):
        read_saved_config(str(tmp_path))


def test_the_section_reaches_the_store():
    section = S3Section(
        endpoint_url="http://127.0.0.1:1", region="r", profile="p", part_size="32MiB", parallel=7
    )
    store = open_store("s3://bucket/prefix", section)
    options = store.session.options  # type: ignore[attr-defined]
    assert (options.endpoint_url, options.region, options.profile) == (
        "http://127.0.0.1:1", "r", "p",
    )  # fmt: skip
    assert (options.part_bytes, options.max_parallel) == (32 << 20, 7)
    assert store.url == "s3://bucket/prefix"
    store.close()


@pytest.mark.parametrize("text", ["part_size = 'big'", "parallel = 'x'", "endpoint = 'x'"])
def test_a_wrong_key_or_value_of_the_section_is_named(tmp_path: Path, text: str):
    """I13."""
    path = tmp_path / "c.toml"
    path.write_text(f"[s3]\n{text}")
    with pytest.raises(ConfigError, match=text.split(maxsplit=1)[0]):
        load_config_file(str(path))


@pytest.mark.parametrize("text", ["part_size = '1KiB'", "parallel = 0", "tries_max = 0"])
def test_a_value_that_no_store_takes_ends_the_mount(tmp_path: Path, text: str, capsys):
    path = tmp_path / "c.toml"
    path.write_text(f"[s3]\n{text}")
    words = ["mount", "s3://bucket/x", str(tmp_path / "m"), "--config", str(path)]
    assert main([*words, "--spool", str(tmp_path / "spool")]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("ckptgate: ")
