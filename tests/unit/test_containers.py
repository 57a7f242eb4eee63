"""Containers prove themselves, or say what is wrong and where; no input makes them raise (I13)."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptgate.formats import pickles, safetensors, torch_zip
from ckptgate.formats.base import BytesView
from ckptgate.formats.containers import Container, check_container


def check(path: str, data: bytes) -> Container:
    return check_container(path, BytesView(data))


def npz(**arrays: object) -> bytes:
    np = pytest.importorskip("numpy")
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def npy(array: object, *, allow_pickle: bool = False) -> bytes:
    np = pytest.importorskip("numpy")
    out = io.BytesIO()
    np.save(out, array, allow_pickle=allow_pickle)
    return out.getvalue()


def torch_file(*, legacy: bool = False) -> bytes:
    torch = pytest.importorskip("torch")
    out = io.BytesIO()
    content = {"w": torch.arange(6.0), "step": 3}
    torch.save(content, out, _use_new_zipfile_serialization=not legacy)
    return out.getvalue()


def safetensors_file() -> bytes:
    np = pytest.importorskip("numpy")
    numpy_api = pytest.importorskip("safetensors.numpy")
    tensors = {"a": np.arange(5, dtype=np.float32), "b": np.ones((2, 3), dtype=np.int8)}
    data: bytes = numpy_api.save(tensors, metadata={"format": "np"})
    return data


def plain_zip(names: list[str], body: bytes = b"xyz", method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name in names:
            archive.writestr(name, body)
    return out.getvalue()


def tensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


SMALL_PICKLE = pickle.dumps({"a": [1, 2.5, "x" * 300, (None, True)], "b": {3}}, protocol=4)


@pytest.mark.torch
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin", ".whatever"])
def test_what_torch_saves_is_a_valid_torch_zip(suffix: str) -> None:
    assert check("a/b" + suffix, torch_file()) == Container("torch-zip", True, "")


@pytest.mark.torch
def test_the_old_torch_format_is_named_but_not_proved() -> None:
    assert check("a.pt", torch_file(legacy=True)) == Container("torch-legacy", False, "")


def test_what_numpy_and_safetensors_save_is_valid() -> None:
    np = pytest.importorskip("numpy")
    assert check("a.npz", npz(x=np.arange(9))) == Container("npz", True, "")
    assert check("a.npy", npy(np.zeros((3, 0, 2)))) == Container("npy", True, "")
    assert check("a.npy", npy(np.array(["ä", "bcd"]))) == Container("npy", True, "")
    objects = npy(np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    assert check("a.npy", objects) == Container("npy", True, "")
    assert check("model.safetensors", safetensors_file()) == Container("safetensors", True, "")
    assert check("no-suffix", safetensors_file()) == Container("safetensors", True, "")


def test_compressed_and_streamed_zips_are_valid() -> None:
    np = pytest.importorskip("numpy")
    out = io.BytesIO()
    np.savez_compressed(out, x=np.zeros(100_000))
    assert check("a.npz", out.getvalue()).is_valid

    class Pipe(io.RawIOBase):
        """Cannot seek, so sizes come after the data."""

        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.data += data
            return len(data)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        archive.writestr("s/data.pkl", b"abc" * 50)
        archive.writestr("s/data/0", b"")
    assert check("a.pt", bytes(pipe.data)) == Container("torch-zip", True, "")


def test_an_empty_file_is_nothing_and_no_problem() -> None:
    for name in ("a.pt", "a.safetensors", "a.json", "a.npz", "log.txt"):
        assert check(name, b"") == Container("", False, "")


def test_text_and_unknown_bytes_are_nothing() -> None:
    assert check("loss.txt", b"1 2 3\n") == Container()
    assert check("__0_0.distcp", b"PK\x03\x04 and then raw bytes" * 9) == Container()
    assert check("events.out", bytes(range(256)) * 4) == Container()


def test_a_name_that_promises_what_its_bytes_are_not_is_a_problem_that_says_where() -> None:
    assert "byte 0" in check("a.npy", b"hello").problem
    for name, kind in [("a.npy", "npy"), ("m.safetensors", "safetensors"), ("a.npz", "npz")]:
        found = check(name, b"\x00" * 4096)
        assert (found.kind, found.is_valid) == (kind, False)
        assert found.problem
    assert "are zip" in check("a.pt", plain_zip(["readme"])).problem
    assert "are torch-zip" in check("a.safetensors", plain_zip(["a/data.pkl"])).problem


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin"])
def test_a_name_that_anybodys_bytes_have_claims_nothing_until_they_begin_as_a_container(
    suffix: str,
) -> None:
    assert check("shard-0" + suffix, b"\x00\xff raw bytes" * 300) == Container()
    assert check("shard-0" + suffix, b"hello") == Container()
    assert check("shard-0" + suffix, b"\x80\x04 raw bytes that begin as a pickle") == Container()
    assert check("shard-0" + suffix, SMALL_PICKLE) == Container("pickle", True, "")
    broken = check("shard-0" + suffix, b"PK\x03\x04" + b"\x00\xff raw bytes" * 300)
    assert (broken.kind, broken.is_valid) == ("torch-zip", False)
    assert broken.problem


def test_json_may_hold_nan_and_must_end() -> None:
    assert check("trainer_state.json", b'{"loss": NaN, "n": [1, 2.5e3]}\n').is_valid
    assert not check("trainer_state.json", b'{"loss": NaN, "n": [1, 2').is_valid
    assert "not json" in check("x.json", b"[" * 200_000).problem
    assert check("x.jsonl", b"{}\n{}\n") == Container()


def test_pickles_prove_themselves_by_their_stop() -> None:
    assert check("a.pkl", pickle.dumps({"a": [1, "é", b"x"], "b": 2.5}, protocol=0)).is_valid
    for protocol in range(1, 6):
        data = pickle.dumps({"rng": [b"x" * 70_000, 2**100, -1, "é", 1.5, {2}]}, protocol=protocol)
        assert check("random_states_0.pkl", data) == Container("pickle", True, "")
        assert not check("random_states_0.pkl", data[:-1]).is_valid
        assert "ends at byte" in check("random_states_0.pkl", data + b"x").problem
    big = pickle.dumps([b"x" * 3_000_000, "y" * 1_500_000, [str(i) * 9 for i in range(50_000)]])
    assert check("a.pkl", big).is_valid
    assert not check("a.pkl", big[:-1]).is_valid
    assert not check("a.pkl", big[:4_000_000]).is_valid


@pytest.mark.torch
def test_no_truncation_of_a_torch_file_is_valid() -> None:
    data = torch_file()
    assert not [n for n in range(len(data)) if check("a.pt", data[:n]).is_valid]
    # With less than its first bytes, it is nothing known: neither proved nor refused.
    assert not [n for n in range(4, len(data)) if not check("a.pt", data[:n]).problem]


def test_no_truncation_or_extension_of_any_container_is_valid() -> None:
    """I13: structure that was cut off anywhere is found by size alone."""
    np = pytest.importorskip("numpy")
    samples = {
        "a.npz": npz(x=np.arange(4), y=np.ones(3)),
        "a.npy": npy(np.arange(40)),
        "a.safetensors": safetensors_file(),
        "a.pkl": SMALL_PICKLE,
        "a.zip": plain_zip(["one", "two"]),
    }
    for name, data in samples.items():
        assert check(name, data).is_valid, name
        for n in range(len(data)):
            assert not check(name, data[:n]).is_valid, (name, n)
        for more in (b"\0", b"PK", b"." * 22, data):
            assert not check(name, data + more).is_valid, (name, more[:4])
        assert not check(name, b"\0" + data).is_valid


@pytest.mark.torch
def test_a_piece_taken_out_of_the_middle_or_put_there_is_noticed() -> None:
    data = torch_file()
    for at in range(0, len(data), 7):
        assert not check("a.pt", data[:at] + data[at + 3 :]).is_valid
        assert not check("a.pt", data[:at] + b"abc" + data[at:]).is_valid


def _end_record(data: bytes, **changes: int) -> bytes:
    names = ["disk", "start_disk", "here", "total", "size", "start", "comment"]
    fields = dict(zip(names, struct.unpack("<4H2LH", data[-18:]), strict=True))
    return data[:-18] + struct.pack("<4H2LH", *(fields | changes).values())


def test_hostile_zip_indexes_are_problems_that_name_the_limit() -> None:
    """I13: a huge, negative or overlapping index costs neither memory nor an exception."""
    good = plain_zip(["s/data.pkl", "s/data/0"])
    start, size = struct.unpack("<L", good[-6:-2])[0], struct.unpack("<L", good[-10:-6])[0]
    cases = {
        "too many": _end_record(good, here=60_000, total=60_000),
        "beyond the end": _end_record(good, start=2**32 - 2),
        "directory too small": _end_record(good, size=size - 1),
        "several disks": _end_record(good, disk=1),
        "needs 64 bit": _end_record(good, start=2**32 - 1),
        "comment": _end_record(good, comment=7),
    }
    second = good.index(b"PK\x01\x02", start + 4)
    for field, value in (("overlap", 0), ("outside", 2**31)):
        cases[field] = good[: second + 42] + struct.pack("<L", value) + good[second + 46 :]
    cases["bomb"] = good[: start + 24] + struct.pack("<L", 2**32 - 2) + good[start + 28 :]
    cases["64 bit sizes missing"] = (
        good[: start + 24] + struct.pack("<L", 2**32 - 1) + good[start + 28 :]
    )
    cases["other name"] = good.replace(b"s/data.pkl", b"s/data.pkk", 1)
    for what, data in cases.items():
        found = check("a.pt", data)
        assert not found.is_valid, what
        assert found.problem, what
        assert found.kind == "torch-zip"


class _Sparse:
    """A file that claims a size and has a few real bytes; the rest are zeros."""

    def __init__(self, size: int, pieces: dict[int, bytes]) -> None:
        self.size = size
        self.pieces = pieces

    def read(self, offset: int, length: int) -> bytes:
        for at, data in self.pieces.items():
            if at <= offset < at + len(data):
                return data[offset - at : offset - at + length]
        return bytes(min(length, max(0, self.size - offset), 4096))


def test_zip64_tails_that_claim_terabytes_are_refused_within_little_memory() -> None:
    """I13"""
    size = 5 << 40
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    locator_at, end64_at = size - 42, size - 98
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end64_at, 1)
    for records, directory in ((10**12, end64_at - 4), (10**6 + 1, 60 << 20), (1, 1 << 50), (0, 0)):
        start = end64_at - directory if directory < size else 0
        end64 = struct.pack(
            "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, records, records, directory, start
        )
        view = _Sparse(size, {0: b"PK\x03\x04", end64_at: end64, locator_at: locator + end})
        tracemalloc.start()
        found = check_container("a.pt", view)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not found.is_valid
        assert found.problem
        assert peak < 1 << 20


def test_hostile_safetensors_headers_are_problems() -> None:
    """I13"""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    assert check("a.safetensors", tensors({"a": entry}, b"abcd")).is_valid
    assert check("a.safetensors", tensors({})).is_valid
    cases = {
        "length": (2**63).to_bytes(8, "little") + b"{}",
        "limit": b"",
        "gap": tensors({"a": entry | {"data_offsets": [1, 5]}}, b"abcde"),
        "overlap": tensors({"a": entry, "b": entry | {"data_offsets": [2, 6]}}, b"abcdef"),
        "negative": tensors({"a": entry | {"shape": [-4], "data_offsets": [4, 0]}}, b"abcd"),
        "shape": tensors({"a": entry | {"shape": [5]}}, b"abcd"),
        "huge shape": tensors({"a": entry | {"shape": [2**62] * 60}}, b"abcd"),
        "short": tensors({"a": entry}, b"abc"),
        "long": tensors({"a": entry}, b"abcde"),
        "deep": tensors(b'{"a":' * 100_000 + b"1"),
        "deep raw": tensors(b'{"a":' + b"[" * 500_000),
        "no object": tensors(b"[1,2]  "),
        "not text": tensors(b'{"\xff": 1}'),
        "offsets": tensors({"a": entry | {"data_offsets": [0, 4, 8]}}, b"abcd"),
        "metadata": tensors({"__metadata__": {"a": 1}}),
        "big number": tensors(b'{"a":{"dtype":"U8","shape":[' + b"9" * 9000 + b"]}}"),
    }
    del cases["limit"]
    for what, data in cases.items():
        found = check("a.safetensors", data)
        assert found.kind == "safetensors", what
        assert not found.is_valid, what
        assert found.problem, what
    huge = _Sparse(1 << 40, {0: (safetensors.MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{"})
    assert "limit" in check_container("a.safetensors", huge).problem


def test_hostile_pickles_are_followed_never_executed() -> None:
    """I13"""
    assert "claims" in check("a.pkl", b"\x80\x04\x8e" + b"\xff" * 8).problem
    assert "claims" in check("a.pkl", b"\x80\x04\x8b" + b"\xff\xff\xff\xff").problem
    assert "unknown opcode" in check("a.pkl", b"\x80\x04\xfe.").problem
    assert "does not end" in check("a.pkl", b"\x80\x04c" + b"a" * 100_000).problem
    assert "more than" in check("a.pkl", b"\x80\x04" + b"N" * 8_000_001 + b".").problem
    # As a container this is whole: it isn't for a structure check to say what it may do.
    assert check("a.pkl", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00idtR.").is_valid


def test_npy_headers_that_lie_are_problems() -> None:
    """I13"""
    np = pytest.importorskip("numpy")
    good = npy(np.arange(40))
    for bad in (b"(41,)", b"(-4,)", b"(4,4)"):
        assert not check("a.npy", good.replace(b"(40,)", bad)).is_valid
    assert "version" in check("a.npy", good[:6] + b"\x09" + good[7:]).problem
    assert "limit" in check("a.npy", good[:6] + b"\x02\x00" + b"\xff" * 4 + good[12:]).problem
    shape = b"{'descr': '<f8', 'shape': (" + b"9" * 50 + b",)}\n"
    assert check("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape)) + shape).problem


NAMES = ["a.pt", "a.safetensors", "a.npz", "a.npy", "a.json", "a.pkl", "a.bin", "x", ".metadata"]
STARTS = [b"", b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY\x01\x00", b"\x80\x04", b"\x10" + bytes(7)]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(STARTS), st.binary(max_size=300))
def test_random_bytes_never_raise(name: str, start: bytes, rest: bytes) -> None:
    """I13"""
    found = check(name, start + rest)
    assert isinstance(found, Container)
    assert not (found.is_valid and found.problem)


def _samples() -> dict[str, bytes]:
    np = pytest.importorskip("numpy")
    return {
        "a.npz": npz(x=np.arange(4), y=np.ones(3)),
        "a.npy": npy(np.arange(9)),
        "a.safetensors": safetensors_file(),
        "a.pkl": SMALL_PICKLE,
    }


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_never_raise_and_never_change_the_size_of_a_valid_file(
    data: st.DataObject,
) -> None:
    """I13: bytes replaced may go unseen here (digests are for that), bytes lost or added never.

    A change inside a pickle's strings can end it earlier or later, so there the size isn't bound.
    """
    samples = _samples()
    name = data.draw(st.sampled_from(sorted(samples)))
    raw = bytearray(samples[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    found = check(name, bytes(raw))
    cut = data.draw(st.integers(1, len(raw) - 1))
    assert not (found.is_valid and found.problem)
    if name in {"a.safetensors", "a.npz"}:
        assert not check(name, bytes(raw[:cut])).is_valid or not found.is_valid
    assert isinstance(check(name, bytes(raw[:cut])), Container)


def test_the_limits_have_names_and_the_values_that_the_design_needs() -> None:
    assert torch_zip.MAX_RECORDS >= 100_000
    assert torch_zip.MAX_DIRECTORY_BYTES <= 1 << 27
    assert safetensors.MAX_HEADER_BYTES <= 1 << 26
    assert pickles.MAX_OPCODES >= 10_000_000
