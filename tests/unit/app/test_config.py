"""Configuration and the command line's front: strict, named errors, documented exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptgate.app.build import publisher_settings
from ckptgate.app.cli import main
from ckptgate.app.config import ConfigFile, load_config_file, make_config
from ckptgate.errors import ConfigError, ExitCode, UsageError


def test_a_file_with_every_key_is_read(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text(
        'store = "/s"\nspool = "/sp"\njob = "run:x"\npassthrough = false\nverify = "size"\n'
        '[commit]\ndeadline_s = 5\n[names]\npointers = ["newest"]\n'
    )
    file = load_config_file(str(path))
    assert (file.store, file.passthrough, file.commit.deadline_s) == ("/s", False, 5)
    assert file.names.patterns().is_pointer("newest")
    assert not file.names.patterns().is_pointer("latest")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("stroe = 'x'", "stroe"),
        ("[commit]\ndeadline = 3", "deadline"),
        ("[commit]\ndeadline_s = 'soon'", "deadline_s"),
        ("[commit]\ndeadline_s = -1", "deadline_s"),
        ("passthrough = 3", "passthrough"),
        ("store = [", "store"),
        ("[stop]\nnew_checkpoints = 'maybe'", "new_checkpoints"),
        ("[stop]\ntimeout_s = -1", "timeout_s"),
        ("[room]\nwait_s = -1", "wait_s"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, named: str):
    """I13."""
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config_file(str(path))
    assert str(path) in caught.value.message
    if "[" not in text[-1]:
        assert named in caught.value.message


def test_a_missing_configuration_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_config_file(str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("store", "mountpoint", "spool"),
    [("s", "s/m", "p"), ("s", "m", "s/p"), ("s", "m", "m/p"), ("s", "s", "p"), ("m/s", "m", "p")],
)
def test_the_three_places_lie_apart(tmp_path: Path, store: str, mountpoint: str, spool: str):
    with pytest.raises(UsageError, match="lies in"):
        make_config(
            ConfigFile(),
            store=str(tmp_path / store),
            mountpoint=str(tmp_path / mountpoint),
            spool=str(tmp_path / spool),
        )


@pytest.mark.parametrize(("store", "files"), [("s3://bucket/prefix", 8), ("/store", 2)])
def test_several_files_are_sent_at_once_more_of_them_to_a_bucket(store: str, files: int):
    """Its answers take long, and nobody's disk is in the way."""
    config = make_config(ConfigFile(), store=store, mountpoint="/m", spool="/spool")
    assert publisher_settings(config).upload_threads == files


def test_the_default_spool_is_the_same_at_every_start(tmp_path: Path):
    def spool(mountpoint: str) -> str:
        return make_config(
            ConfigFile(), store=str(tmp_path / "s"), mountpoint=mountpoint, spool=""
        ).spool

    assert spool(str(tmp_path / "m")) == spool(f"{tmp_path}/x/../m")
    assert spool(str(tmp_path / "m")) != spool(str(tmp_path / "n"))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["no-such-command"],
        ["commit"],
        ["ls"],
        ["wait", "x", "--timeout", "soon"],
    ],
)
def test_wrong_usage_ends_with_64(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == ExitCode.USAGE
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["commit", "x", "--rank", "1"], ExitCode.USAGE),
        (["commit", "x", "--rank", "1", "--world-size", "2", "--all"], ExitCode.USAGE),
        (["commit", "x"], ExitCode.USAGE),
        (["mount"], ExitCode.USAGE),
        (["mount", "store", "mnt", "more"], ExitCode.USAGE),
        (["exec"], ExitCode.USAGE),
        (["exec", "--", "no-such-program-anywhere"], ExitCode.NOT_FOUND),
        (["ls", "/no/such/run"], ExitCode.NOT_FOUND),
        (["show", "/no/such/run/step-1"], ExitCode.NOT_FOUND),
        (["umount", "/no/such/mount"], ExitCode.NOT_FOUND),
        (["status", "/no/such/mount"], ExitCode.NOT_FOUND),
        (["mount", "--config", "/no/such/file", "/tmp/m"], ExitCode.USAGE),
    ],
)
def test_what_cannot_be_done_has_its_exit_code(
    words: list[str],
    code: ExitCode,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("CKPTGATE_RUN_ID", raising=False)
    monkeypatch.setenv("CKPTGATE_RUN_ID", "kept")  # exec sets it; the test's end restores it
    assert main(words) == code
    assert capsys.readouterr().err.startswith("ckptgate: ")


@pytest.mark.parametrize("store", ["/nfs/run/.ckptgate", "s3://bucket/x/.ckptgate/attempts"])
def test_the_gateways_own_directory_is_no_store(store: str):
    with pytest.raises(UsageError, match="ckptgate's own directory") as caught:
        make_config(ConfigFile(), store=store, mountpoint="/mnt", spool="/spool")
    assert caught.value.hint in {"mount /nfs/run", "mount s3://bucket/x"}
