"""DCP: what its metadata says must exist, read without executing anything."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.formats.builders import dcp_metadata

from ckptgate.errors import IntegrityError, MissingError
from ckptgate.formats import registry
from ckptgate.formats.base import BytesView
from ckptgate.formats.dcp import Dcp, read_metadata
from ckptgate.formats.inert import Inert, Pairs, read_inert


class FakeTree:
    """Files in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def files(self) -> Mapping[str, int]:
        return {path: len(data) for path, data in self._files.items()}

    def open(self, path: str) -> BytesView:
        return BytesView(self._files[path])


def read_all(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A real DCP as one process saves it."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    folder = tmp_path_factory.mktemp("dcp")
    state = {
        "model": {"w": torch.arange(1000.0), "b": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": {"state": [torch.zeros(4, 4), {"lr": 0.1}]},
        "step": 3,
        "name": OrderedDict(a=1),
    }
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return read_all(folder)


def metadata_of(data: bytes) -> Any:
    """As torch reads it (only of files that this test's torch wrote)."""
    return pickle.loads(data)


@pytest.mark.torch
def test_a_real_metadata_gives_every_file_and_the_size_it_must_have(
    saved: dict[str, bytes],
) -> None:
    expected = Dcp().expected(FakeTree(saved))
    truth: dict[str, int] = {".metadata": len(saved[".metadata"])}
    for info in metadata_of(saved[".metadata"]).storage_data.values():
        end = info.offset + info.length
        truth[info.relative_path] = max(truth.get(info.relative_path, 0), end)
    assert expected.files == truth
    assert expected.files["__0_0.distcp"] == len(saved["__0_0.distcp"])
    assert expected.format_name == "dcp"
    assert not expected.every_rank
    assert expected.world_size is None
    assert expected.source == ".metadata"


@pytest.mark.torch
@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_pickle_protocol_of_a_metadata_says_the_same(
    saved: dict[str, bytes], protocol: int
) -> None:
    again = pickle.dumps(metadata_of(saved[".metadata"]), protocol=protocol)
    assert read_metadata(BytesView(again), "m") == read_metadata(BytesView(saved[".metadata"]), "m")


@pytest.mark.torch
def test_attached_plans_of_all_ranks_give_the_world_size(saved: dict[str, bytes]) -> None:
    metadata = metadata_of(saved[".metadata"])
    metadata.all_local_plans = [{"rank": rank} for rank in range(6)]
    assert read_metadata(BytesView(pickle.dumps(metadata)), "m").world_size == 6


def test_a_metadata_is_read_once_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new vote asks again; other bytes are other metadata, whatever their name."""
    times: list[str] = []

    def counted(data: bytes, **words: Any) -> object:
        times.append(words["subject"])
        return read_inert(data, **words)

    monkeypatch.setattr("ckptgate.formats.dcp.read_inert", counted)
    one, two = (dcp_metadata({f"__{rank}_0.distcp": 4}) for rank in (8, 9))
    for data in (one, two, one, two):
        said = read_metadata(BytesView(data), "m")
        assert said.files == {f"__{8 if data == one else 9}_0.distcp": 4}
    assert len(times) == 2
    for _ in range(2):
        with pytest.raises(IntegrityError):
            read_metadata(BytesView(one[:-1]), "m")
    assert len(times) == 4, "what can't be read is refused each time"


@pytest.mark.torch
def test_empty_rank_files_and_stale_shards_are_not_expected_but_may_be_there(
    saved: dict[str, bytes],
) -> None:
    more = saved | {"__1_0.distcp": b"", "__7_0.distcp": b"of a larger world"}
    assert Dcp().expected(FakeTree(more)) == Dcp().expected(FakeTree(saved))


@pytest.mark.torch
def test_a_nested_dcp_expects_its_own_files_and_is_no_commit_event(
    saved: dict[str, bytes],
) -> None:
    nested = {f"model/{path}": data for path, data in saved.items()}
    files = Dcp().expected(FakeTree(nested | {"optimizer/__0_0.distcp": b"x"})).files
    assert files["model/__0_0.distcp"] == len(saved["__0_0.distcp"])
    assert files["optimizer/.metadata"] == 1
    assert registry.recognise(nested)
    old, new = "model/.metadata.tmp", "model/.metadata"
    assert registry.commit_event(nested, "rename", new, old) is None


def test_shards_without_metadata_expect_it() -> None:
    expected = Dcp().expected(FakeTree({"__0_0.distcp": b"x"}))
    assert expected.files == {".metadata": 1}


@pytest.mark.torch
def test_metadata_of_each_rank_alone_need_every_rank(saved: dict[str, bytes]) -> None:
    """Without the common one no file says how many ranks there are."""
    files = {"__0.metadata": saved[".metadata"], "__0_0.distcp": saved["__0_0.distcp"]}
    expected = Dcp().expected(FakeTree(files))
    assert expected.every_rank
    assert set(expected.files) == set(files)
    both = Dcp().expected(FakeTree(files | {".metadata": saved[".metadata"]}))
    assert not both.every_rank


def test_the_arrival_of_metadata_is_the_commit_event_and_nothing_else_is() -> None:
    paths = ["__0_0.distcp"]
    found = registry.commit_event(paths, "rename", ".metadata", ".metadata.tmp")
    assert found is not None
    assert (found[0].name, found[1].name, found[1].is_early) == ("dcp", "dcp-metadata", False)
    assert registry.commit_event([], "close", ".metadata", "") is not None
    for path in (".metadata.tmp", "__0_0.distcp", "__0.metadata", "a/.metadata", "x.json"):
        assert registry.commit_event(paths, "close", path, "") is None
    assert registry.commit_event(paths, "rename", ".metadata.old", ".metadata") is None


def test_formats_are_recognised_from_names_and_found_by_name() -> None:
    dcp = registry.by_name("dcp")
    for paths in ([".metadata"], ["__12_3.distcp"], ["a/.metadata"], ["x", "m/__0_0.distcp"]):
        assert registry.recognise(paths) is dcp
    for paths in ([], ["a/b/.metadata"], ["model.safetensors"], ["__0.distcp"], ["x.metadata"]):
        assert registry.recognise(paths) is None
    with pytest.raises(MissingError, match="'nope'"):
        registry.by_name("nope")


class Evil:
    """Would run a command if it were unpickled."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = (call, args)

    def __reduce__(self) -> Any:
        return self.call


def hostile_pickles() -> dict[str, bytes]:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    op = {
        "persistent id": b"\x80\x04\x8c\x02idQ.",
        "persistent id line": b"Pid\n.",
        "extension": b"\x80\x02\x82\x01.",
        "inst": b"(S'id'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nX\x02\x00\x00\x00ido.",
        "huge memo": b"\x80\x02]r\xff\xff\xff\xff0j\xfe\xff\xff\xff.",
        "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        "no stop": b"\x80\x04N",
        "empty stack": b"\x80\x04R.",
        "mark at stop": b"\x80\x04(.",
        "two values": b"\x80\x04NN.",
        "append to none": b"\x80\x04NNa.",
        "items on none": b"\x80\x04NNNs.",
        "odd pairs": b"\x80\x04}(Nu.",
        "call of a string": b"\x80\x04\x8c\x01a)R.",
        "build on nothing": b"\x80\x04Nb.",
        "not an index": b"gx\n.",
        "buffer": b"\x80\x05\x97.",
        "long int": b"L" + b"9" * 5000 + b"\n.",
        "trailing": b"\x80\x04N.N",
    }
    return op | {
        "os.system": pickle.dumps(Evil(os.system, "touch /tmp/never")),
        "eval": pickle.dumps(Evil(eval, "1")),
        "getattr": pickle.dumps(Evil(getattr, "a", "upper")),
        "getattr through torch": b"\x80\x02ctorch\nos.system\nX\x02\x00\x00\x00id\x85R.",
        "reconstructor of open": pickle.dumps(Evil(io.open, "/tmp/never", "w")),
        "not a metadata": pickle.dumps(deep),
    }


@pytest.mark.parametrize("what", sorted(hostile_pickles()))
def test_a_hostile_pickle_is_an_error_that_names_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13: nothing it names is called or imported."""

    def never(*args: object) -> object:
        msg = f"executed: {args}"
        raise AssertionError(msg)

    data = hostile_pickles()[what]
    for target in ("system", "popen"):
        monkeypatch.setattr(os, target, never)
    monkeypatch.setattr("importlib.import_module", never)
    with pytest.raises(IntegrityError, match=r"run/\.metadata") as caught:
        read_metadata(BytesView(data), "run/.metadata")
    assert caught.value.subject == "run/.metadata"
    assert not os.path.exists("/tmp/never")


def test_the_global_that_does_not_belong_is_named() -> None:
    with pytest.raises(IntegrityError, match=r"names (posix|os|nt)\.system"):
        read_metadata(BytesView(hostile_pickles()["os.system"]), ".metadata")


def test_deep_nesting_and_cycles_do_not_recurse() -> None:
    """I13: tuples half a million deep would overflow the C stack if they were ever hashed."""
    depth = 500_000
    nested = b"\x80\x02)" + b"\x85" * depth + b"}" + b"(NNu0."
    pairs = b"\x80\x02}(" + b")" + b"\x85" * depth + b"Nu."
    cycle = b"\x80\x02]q\x00h\x00a."
    allow: dict[str, Any] = {
        "is_allowed": lambda _m, _n: False,
        "is_kept": lambda _n: False,
        "subject": "x",
    }
    assert isinstance(read_inert(nested, **allow), tuple)
    value = read_inert(pairs, **allow)
    assert isinstance(value, Pairs)
    del value
    cyclic = read_inert(cycle, **allow)
    assert isinstance(cyclic, list)
    assert cyclic[0] is cyclic


def _metadata(**fields: object) -> bytes:
    """A metadata with *fields*, built without torch."""

    class Metadata:
        def __reduce__(self) -> Any:
            raise AssertionError

    Metadata.__module__ = "torch.distributed.checkpoint.metadata"
    Metadata.__qualname__ = "Metadata"
    return _dump(Metadata, fields)


def _dump(kind: type, fields: object) -> bytes:
    """`kind` with state *fields*, named only; _StorageInfo for dicts with `relative_path`."""

    def encode(value: object) -> bytes:
        if isinstance(value, dict) and "relative_path" in value:
            name = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
            return name + b")\x81" + plain(value) + b"b"
        return plain(value)

    def plain(value: object) -> bytes:
        if isinstance(value, dict):
            items = b"".join(encode(k) + encode(v) for k, v in value.items())
            return b"}(" + items + b"u"
        return pickle.dumps(value, protocol=2)[2:-1]

    name = f"c{kind.__module__}\n{kind.__qualname__}\n".encode()
    return b"\x80\x02" + name + b")\x81" + plain(fields) + b"b."


def _info(path: object = "__0_0.distcp", offset: object = 0, length: object = 5) -> dict[str, Any]:
    return {"relative_path": path, "offset": offset, "length": length}


def test_a_handmade_metadata_reads_like_a_real_one() -> None:
    data = _metadata(storage_data={"a": _info(), "b": _info(offset=100), "c": _info("x/y", 1, 0)})
    assert read_metadata(BytesView(data), "m").files == {"__0_0.distcp": 105, "x/y": 1}


@pytest.mark.parametrize(
    "info",
    [
        _info("../../etc/passwd"),
        _info("/etc/passwd"),
        _info(""),
        _info("a\nb"),
        _info(7),
        _info(offset=-1),
        _info(length=2**80),
        _info(offset=True),
        _info(offset="1"),
        "no info at all",
    ],
)
def test_a_metadata_with_an_impossible_place_is_refused(info: object) -> None:
    """I13: a path never leaves its checkpoint."""
    with pytest.raises(IntegrityError, match="metadata m"):
        read_metadata(BytesView(_metadata(storage_data={"a": info})), "m")


def test_a_metadata_without_storage_or_of_another_class_is_refused() -> None:
    for data in (_metadata(), _metadata(storage_data=[1]), pickle.dumps({"storage_data": {}})):
        with pytest.raises(IntegrityError, match="metadata m"):
            read_metadata(BytesView(data), "m")


@pytest.mark.torch
def test_no_truncation_of_a_metadata_is_read(saved: dict[str, bytes]) -> None:
    data = saved[".metadata"]
    for n in range(len(data)):
        with pytest.raises(IntegrityError):
            read_metadata(BytesView(data[:n]), ".metadata")


@pytest.mark.torch
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_mutated_metadata_is_read_or_refused_by_name(
    saved: dict[str, bytes], data: st.DataObject
) -> None:
    """I13"""
    raw = bytearray(saved[".metadata"])
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(IntegrityError):
        files = read_metadata(BytesView(bytes(raw)), ".metadata").files
        assert all(size >= 0 and not path.startswith("/") for path, size in files.items())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """I13"""
    with pytest.raises(IntegrityError):
        read_metadata(BytesView(data), ".metadata")


def test_what_an_inert_reader_keeps_is_what_was_asked_for() -> None:
    value = OrderedDict([("a", (1, 2.5, None, True, b"x", "é", -3, 2**70))])
    for protocol in range(2, 6):
        kept = read_inert(
            pickle.dumps(value, protocol=protocol),
            is_allowed=lambda module, _: module in {"collections", "_codecs", "builtins"},
            is_kept=lambda name: name == "collections.OrderedDict",
            subject="x",
        )
        assert isinstance(kept, Inert)
        assert kept.items is not None
        inner = kept.items.find("a")
        assert isinstance(inner, tuple)
        assert inner[:4] == (1, 2.5, None, True)
        assert inner[5:] == ("é", -3, 2**70)
