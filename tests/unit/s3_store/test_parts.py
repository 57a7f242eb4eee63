"""How files are cut into parts: whatever their size, within the limits of the service."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.errors import RefusedError
from ckptgate_adapters.s3_store.parts import (
    OBJECT_BYTES_MAX,
    PART_BYTES_MAX,
    PART_BYTES_MIN,
    PARTS_MAX,
    plan_parts,
)

MIB = 1024 * 1024


@given(
    st.one_of(
        st.integers(0, OBJECT_BYTES_MAX),
        st.integers(0, PARTS_MAX).map(lambda n: n * 16 * MIB),
        st.integers(0, 100).map(lambda n: OBJECT_BYTES_MAX - n),
    ),
    st.integers(PART_BYTES_MIN, 64 * MIB),
)
def test_any_size_fits_ten_thousand_parts_of_legal_size(size: int, part_bytes: int) -> None:
    plan = plan_parts(size, part_bytes)
    assert 1 <= plan.count <= PARTS_MAX
    assert part_bytes <= plan.part_bytes <= PART_BYTES_MAX
    assert (plan.count - 1) * plan.part_bytes < max(size, 1) <= plan.count * plan.part_bytes


@given(st.integers(0, 40), st.integers(-1, 1))
def test_the_parts_are_the_file_in_order(count: int, more: int) -> None:
    size = max(0, count * PART_BYTES_MIN + more)
    parts = list(plan_parts(size, PART_BYTES_MIN))
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert [part.offset for part in parts] == [PART_BYTES_MIN * n for n in range(len(parts))]
    assert sum(part.size for part in parts) == size
    assert all(part.size == PART_BYTES_MIN for part in parts[:-1])


def test_the_largest_object_is_48_8_tib_and_no_byte_more() -> None:
    assert plan_parts(OBJECT_BYTES_MAX, 16 * MIB).count == PARTS_MAX
    assert f"{OBJECT_BYTES_MAX / 1024**4:.1f}" == "48.8"
    with pytest.raises(RefusedError, match="larger than an object"):
        plan_parts(OBJECT_BYTES_MAX + 1, 16 * MIB)
