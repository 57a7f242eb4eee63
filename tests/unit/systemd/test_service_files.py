"""`ckptgate service install` and `uninstall` of an image: what is put where, and what stays."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import msgspec
import pytest

from ckptgate.app.cli import main
from ckptgate.app.config import ConfigFile, load_config_file, make_config
from ckptgate.errors import ExitCode
from ckptgate_adapters.systemd import places
from ckptgate_adapters.systemd.places import Done, FileToPlace, inside, place, take_away

FILES = {
    "etc/ckptgate/nightly.toml",
    "etc/systemd/system/ckptgate@.service",
    "etc/systemd/system/ckptgate@nightly.service.d/10-places.conf",
    "etc/sysusers.d/ckptgate.conf",
    "etc/tmpfiles.d/ckptgate.conf",
    "sbin/mount.ckptgate",
}
PROGRAM = "/opt/ckptgate/bin/ckptgate"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "image"
    root.mkdir()
    return root


def service(action: str, image: Path, *more: str, name: str = "nightly") -> int:
    return main(["service", action, name, "--root", str(image), *more])


def install(image: Path, *more: str, name: str = "nightly") -> int:
    return service("install", image, "--exec", PROGRAM, *more, name=name)


def found(image: Path) -> set[str]:
    return {
        str(path.relative_to(image))
        for path in image.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_all_files_are_put_in_place_and_told(image: Path, capsys):
    assert install(image) == 0
    assert found(image) == FILES
    said = capsys.readouterr().out
    assert all(f"written   /{path}" in said for path in FILES)
    assert f"systemctl --root={image} enable ckptgate@nightly.service" in said
    unit = (image / "etc/systemd/system/ckptgate@.service").read_text()
    assert f"ExecStart={PROGRAM} mount --foreground --config /etc/ckptgate/%i.toml" in unit
    assert os.readlink(image / "sbin/mount.ckptgate") == "/opt/ckptgate/bin/mount.ckptgate"
    assert (image / "etc/ckptgate/nightly.toml").stat().st_mode & 0o777 == 0o640


def test_the_example_is_a_configuration_that_can_be_mounted(image: Path):
    assert install(image) == 0
    file = load_config_file(str(image / "etc/ckptgate/nightly.toml"))
    config = make_config(file, store="", mountpoint=file.mountpoint, spool="")
    assert config.spool == "/var/lib/ckptgate/nightly"
    assert config.mountpoint == "/mnt/checkpoints"
    assert file.stop == ConfigFile().stop
    raw = places.read_template("example.toml")
    assert msgspec.convert(tomllib.loads(raw), ConfigFile).store == "/srv/checkpoints"


def test_a_repeat_changes_nothing_and_never_overwrites_what_the_operator_wrote(image, capsys):
    assert install(image, "--store", "/nfs/a", "--mountpoint", "/mnt/a", "--spool", "/nvme/a") == 0
    config = image / "etc/ckptgate/nightly.toml"
    file = load_config_file(str(config))
    assert (file.store, file.mountpoint, file.spool) == ("/nfs/a", "/mnt/a", "/nvme/a")
    config.write_text('log_level = "DEBUG"\n' + config.read_text())
    mine = config.read_text()
    capsys.readouterr()
    assert install(image) == 0
    said = capsys.readouterr().out
    assert config.read_text() == mine
    assert "kept      /etc/ckptgate/nightly.toml (it is yours)" in said
    assert said.count("unchanged ") == len(FILES) - 1


def test_the_file_systems_of_its_places_are_mounted_before(image: Path):
    config = image / "etc/ckptgate/nightly.toml"
    config.parent.mkdir(parents=True)
    config.write_text('store = "/nfs/a b%c"\nmountpoint = "/mnt/x/y"\nspool = "/nvme/s"\n')
    assert install(image) == 0
    drop_in = (image / "etc/systemd/system/ckptgate@nightly.service.d/10-places.conf").read_text()
    wanted = [line for line in drop_in.splitlines() if line.startswith("RequiresMountsFor=")]
    assert wanted == [
        "RequiresMountsFor=/nvme/s",
        'RequiresMountsFor="/nfs/a b%%c"',
        "RequiresMountsFor=/mnt/x",
    ]


def test_a_dry_run_says_the_same_and_does_nothing(image: Path, capsys):
    assert install(image, "--dry-run") == 0
    assert found(image) == set()
    said = capsys.readouterr().out
    assert "written   /etc/ckptgate/nightly.toml" in said
    assert said.endswith("dry run: nothing of this was done\n")
    assert install(image) == 0
    assert service("uninstall", image, "--dry-run") == 0
    assert found(image) == FILES


def test_uninstalling_removes_what_was_installed_and_no_spool(image: Path, capsys):
    spool = image / "var/lib/ckptgate/nightly"
    spool.mkdir(parents=True)
    (spool / "spool.db").write_text("staged")
    assert install(image) == 0
    assert install(image, name="weekly") == 0
    assert service("uninstall", image) == 0
    said = capsys.readouterr().out
    assert "what ckptgate@weekly.service needs, too" in said
    assert "/var/lib/ckptgate/nightly (the spool" in said
    assert "etc/systemd/system/ckptgate@.service" in found(image)
    assert not any("nightly" in path for path in found(image) if "var/" not in path)
    assert service("uninstall", image, name="weekly") == 0
    # The helper links to another ckptgate than the one that uninstalls.
    assert found(image) - {"sbin/mount.ckptgate"} == {"var/lib/ckptgate/nightly/spool.db"}
    assert service("uninstall", image) == 0


@pytest.mark.parametrize(
    ("old", "new"), [('"/nfs/a"', '"/nfs/b"'), ("\n# `", "\n# My own.\n# `"), ("", "")]
)
def test_only_a_configuration_that_was_changed_stays(image: Path, old: str, new: str, capsys):
    """With whatever places it was installed; a repeated `install` changes nothing of that."""
    assert install(image, "--store", "/nfs/a", "--spool", "/nvme/a") == 0
    config = image / "etc/ckptgate/nightly.toml"
    config.write_text(config.read_text().replace(old, new) if old else config.read_text())
    assert install(image, "--store", "/nfs/c") == 0
    capsys.readouterr()
    assert service("uninstall", image) == 0
    assert config.exists() == bool(old)
    said = "kept      /etc/ckptgate/nightly.toml (it was changed since)"
    assert (said in capsys.readouterr().out) == bool(old)


def test_what_follows_a_configuration_s_last_line_is_a_change(image: Path):
    assert install(image) == 0
    config = image / "etc/ckptgate/nightly.toml"
    config.write_text(config.read_text() + "[commit]\ndeadline_s = 60\n")
    assert service("uninstall", image) == 0
    assert config.exists()


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "-x", ".x", "a b", "ä", "x" * 65, "a\nb", "a%i", "a@b", "a\\x2d"]
)
def test_a_name_that_needs_an_escape_anywhere_is_refused(image: Path, name: str, capsys):
    """I13."""
    words = ["service", "install", "--root", str(image), "--", name]
    assert main(words) == ExitCode.USAGE
    assert "name" in capsys.readouterr().err
    assert found(image) == set()


def test_a_configuration_that_does_not_load_is_named_before_anything_is_done(image, capsys):
    """I13."""
    config = image / "etc/ckptgate/nightly.toml"
    config.parent.mkdir(parents=True)
    config.write_text("stroe = 3\n")
    assert install(image) == ExitCode.USAGE
    assert "stroe" in capsys.readouterr().err
    assert found(image) == {"etc/ckptgate/nightly.toml"}
    # It can still be got rid of.
    assert service("uninstall", image) == 0


@pytest.mark.parametrize(
    "program", ["ckptgate", "/opt/my tools/ckptgate", "/opt/%h/ckptgate", "/a;b"]
)
def test_a_program_that_a_unit_cannot_name_is_refused(image: Path, program: str):
    """I13."""
    assert service("install", image, "--exec", program) == ExitCode.USAGE
    assert found(image) == set()


def test_a_store_that_would_break_the_file_is_refused(image: Path):
    """I13."""
    assert install(image, "--mountpoint", '/mnt/"\nspool = "/etc') == ExitCode.USAGE
    assert found(image) == set()


def test_a_link_of_an_image_means_something_in_the_image(image: Path):
    (image / "usr/sbin").mkdir(parents=True)
    (image / "sbin").symlink_to("/usr/sbin")
    assert inside(str(image), "/sbin/x") == str(image / "usr/sbin/x")
    assert inside("", "/sbin/x") == "/sbin/x"
    assert install(image) == 0
    assert (image / "usr/sbin/mount.ckptgate").is_symlink()


@pytest.mark.parametrize("up", ["../" * 30, "/../", "usr/../../../../"])
def test_no_link_of_an_image_leads_out_of_it(tmp_path: Path, up: str):
    """I13: what an image says its directories are is not to change the machine."""
    image, outside = tmp_path / "image", tmp_path / "outside"
    image.mkdir()
    outside.mkdir()
    (image / "usr").mkdir()
    (image / "etc").symlink_to(f"{up}{str(outside).lstrip('/')}")
    assert install(image) == 0
    assert list(outside.iterdir()) == []
    there = image / str(outside).lstrip("/")
    assert (there / "systemd/system/ckptgate@.service").exists()


def test_links_of_an_image_that_lead_nowhere_are_an_error(image: Path, capsys):
    (image / "etc").symlink_to("etc")
    assert install(image) == ExitCode.UNUSABLE
    assert "symlinks" in capsys.readouterr().err


def test_a_file_is_there_whole_or_as_it_was(image: Path, monkeypatch):
    file = FileToPlace(path="/etc/x.conf", content="new")
    assert place(file, root=str(image), is_dry=False).done is Done.WRITTEN
    (image / "etc/x.conf").write_text("old")
    (image / "etc/x.conf.ckptgate-new").write_text("left by a killed install")

    def fail(old: str, new: str) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", fail)
        with pytest.raises(OSError, match="no space"):
            place(file, root=str(image), is_dry=False)
    assert (image / "etc/x.conf").read_text() == "old"
    assert not (image / "etc/x.conf.ckptgate-new").exists()
    assert place(file, root=str(image), is_dry=False).done is Done.REPLACED
    assert (image / "etc/x.conf").read_text() == "new"


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(image: Path):
    (image / "etc").mkdir()
    (image / "victim").write_text("mine")
    (image / "etc/x.conf").symlink_to(image / "victim")
    file = FileToPlace(path="/etc/x.conf", content="new")
    assert place(file, root=str(image), is_dry=False).done is Done.REPLACED
    assert (image / "victim").read_text() == "mine"
    assert (image / "etc/x.conf").read_text() == "new"
    assert take_away(file, root=str(image), is_dry=False).done is Done.REMOVED
    assert take_away(file, root=str(image), is_dry=False).done is Done.ABSENT


def test_without_the_right_to_it_is_said(image: Path, capsys, require):
    require(os.geteuid() == 0, "the other user is made by root")
    image.chmod(0o755)
    for above in image.parents:
        if above.stat().st_mode & 0o005 != 0o005:
            above.chmod(above.stat().st_mode | 0o005)
        if str(above) == "/tmp":
            break
    os.seteuid(65534)
    try:
        assert install(image) == ExitCode.UNUSABLE
    finally:
        os.seteuid(0)
    assert "as root, or --root DIR" in capsys.readouterr().err
