"""What trainers legally write and what must not be taken for damage: small types, tied weights."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import pytest
from tests.unit.formats.builders import MemoryTree, index_file, safetensors_file

from ckptgate.formats import registry
from ckptgate.formats.base import BytesView
from ckptgate.formats.containers import Container, check_container
from ckptgate.model.closure import is_covered


def check(path: str, data: bytes) -> Container:
    return check_container(path, BytesView(data))


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("BF16", [3, 2], 12),
        ("F16", [3], 6),
        ("F8_E4M3", [3], 3),
        ("F4", [4], 2),
        ("BF16", [], 2),
        ("BF16", [0, 7], 0),
        ("OF_A_LATER_RELEASE", [3], 9),
    ],
)
def test_safetensors_of_small_and_unknown_types_are_valid(
    dtype: str, shape: list[int], size: int
) -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(size)
    assert check("model.safetensors", data) == Container("safetensors", True, "")


@pytest.mark.torch
def test_torch_files_with_bf16_and_tied_weights_are_valid() -> None:
    torch = pytest.importorskip("torch")
    embedding = torch.ones(5, 3, dtype=torch.bfloat16)
    out = io.BytesIO()
    torch.save({"embed.weight": embedding, "lm_head.weight": embedding}, out)
    assert check("model.pt", out.getvalue()) == Container("torch-zip", True, "")
    names = zipfile.ZipFile(out).namelist()
    assert len([name for name in names if "/data/" in name and name[-1].isdigit()]) == 1


def test_an_index_that_leaves_tied_weights_out_or_names_a_shard_twice_is_covered() -> None:
    """The Hugging Face libraries store one of the tied ones, and name no file for the other."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {shard: safetensors_file() for shard in shards}
    files["model.safetensors.index.json"] = index_file([shards[0], shards[1], shards[0]])
    known = registry.recognise(files, "step-1")
    assert known is not None
    expected = registry.expected(known, MemoryTree(files))
    sizes = {path: len(data) for path, data in files.items()}
    assert is_covered(expected, sizes, 2)
    # One shard fewer than the names say: the tied weights were all that it had.
    del sizes[shards[1]]
    fewer = dict.fromkeys(sizes, b"") | {"model.safetensors.index.json": index_file([shards[0]])}
    assert is_covered(registry.expected(known, MemoryTree(fewer)), sizes, 2)
