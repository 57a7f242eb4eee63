"""The repository's documents against its code: what they name exists, and what exists is named."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from ckptgate.app.cli import build_parser
from ckptgate.app.config import ConfigFile
from ckptgate.app.sections import (
    CommitSection,
    IncidentsSection,
    LogSection,
    NamesSection,
    ReclaimSection,
    RoomSection,
    S3Section,
    StatusSection,
)
from ckptgate.errors import CkptError, ErrorKind, ExitCode
from ckptgate.model import documents, entries
from ckptgate.model.documents import Document

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FORMAT = (ROOT / "gateway/FORMAT.md").read_text()
DESIGN = (ROOT / "gateway/DESIGN.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_option_is_in_the_readme(name: str):
    row = next(line for line in README.splitlines() if line.startswith(f"| `{name} "))
    for action in commands()[name]._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        for option in action.option_strings:
            assert option in row, f"{name} {option}"


def test_every_exit_code_is_in_the_readme():
    rows = set(re.findall(r"^\| (\d+) \|", README, re.MULTILINE))
    assert rows == {str(int(code)) for code in ExitCode}


def test_every_configuration_key_is_in_the_readme():
    for section in (
        ConfigFile,
        CommitSection,
        NamesSection,
        RoomSection,
        ReclaimSection,
        S3Section,
        LogSection,
        StatusSection,
        IncidentsSection,
    ):
        for key in section.__struct_fields__:
            assert re.search(rf"\b{key}\b", README), key


def test_the_readme_names_no_unknown_configuration_key():
    block = README[README.index("```toml") :].split("```")[1].removeprefix("toml\n")
    msgspec.convert(tomllib.loads(block), ConfigFile)


def document_types() -> list[type[Document]]:
    found = [*vars(documents).values(), *vars(entries).values()]
    return sorted(
        {t for t in found if isinstance(t, type) and issubclass(t, Document) and t is not Document},
        key=lambda t: t.__name__,
    )


@pytest.mark.parametrize("kind", document_types(), ids=lambda t: t.__name__)
def test_every_field_of_every_stored_document_is_in_the_format(kind: type[Document]):
    name = kind.__struct_config__.tag or kind.__name__
    if kind.__name__ not in {"Evidence", "ChunkRef"}:
        assert f"`{name}`" in FORMAT or f"### {name}" in FORMAT, name
    for field in kind.__struct_fields__:
        assert f"`{field}`" in FORMAT, f"{name}.{field}"


def test_every_error_kind_belongs_to_an_error():
    def all_kinds(cls: type[CkptError]) -> set[ErrorKind]:
        return {cls.kind}.union(*(all_kinds(sub) for sub in cls.__subclasses__()))

    assert all_kinds(CkptError) == set(ErrorKind)


def test_every_dependency_has_its_reason():
    for requirement in PROJECT["project"]["dependencies"]:
        name = re.split(r"[<>=\[]", requirement)[0]
        assert re.search(rf"^\| {name}", DESIGN, re.MULTILINE), name


def test_the_installed_version_is_the_package_s_own():
    import importlib.metadata

    from ckptgate import __version__

    assert importlib.metadata.version("ckptgate") == __version__


@pytest.mark.parametrize("invariant", [f"I{n}" for n in range(1, 14)])
def test_every_invariant_has_a_test_that_names_it(invariant: str):
    assert re.search(rf"\b{invariant}\b", DESIGN)
    naming = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and re.search(rf"\b{invariant}\b", path.read_text())
    ]
    assert naming


def test_modules_stay_readable():
    """No module of the product is longer than 450 lines."""
    for root in ("gateway", "adapters"):
        for path in (ROOT / root).rglob("*.py"):
            # The contract is a suite of tests that ships.
            if path.name != "store_contract.py":
                assert len(path.read_text().splitlines()) <= 450, path
