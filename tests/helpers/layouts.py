"""Hypothesis strategies for layouts, and checks of invariants of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from tests._internals import ALIGNMENT_BYTES, GatherLayout, ReduceLayout, TensorShards

__all__ = [
    "DIRECT_BYTES",
    "NEVER_ZERO_COPY",
    "SHAPES",
    "WORLD_SIZES",
    "assert_disjoint_and_aligned",
    "assert_packed_first",
    "shards_of_one_bucket",
    "tensor_shards",
]

WORLD_SIZES = st.integers(1, 9)
SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def tensor_shards(draw: st.DrawFn, num_shards: int | None = None) -> TensorShards:
    """Draw a shape of 1 to 4 dims, possibly empty, sharded on any dim."""
    shape = draw(SHAPES)
    dim = draw(st.integers(0, len(shape) - 1))
    return TensorShards(shape, dim, draw(WORLD_SIZES) if num_shards is None else num_shards)


@st.composite
def shards_of_one_bucket(draw: st.DrawFn) -> tuple[TensorShards, ...]:
    """Draw one to five tensors, all with the same number of shards."""
    num_shards = draw(WORLD_SIZES)
    return tuple(draw(st.lists(tensor_shards(num_shards), min_size=1, max_size=5)))


NEVER_ZERO_COPY = 1 << 62
DIRECT_BYTES = st.sampled_from([0, 1, 64, 512, NEVER_ZERO_COPY])


def assert_disjoint_and_aligned(offsets: Sequence[int], lengths: Sequence[int], numel: int, itemsize: int) -> None:
    """Check that segments are aligned, disjoint and inside ``range(numel)``, and that ``numel`` is aligned."""
    assert len(offsets) == len(lengths)
    end = 0
    for offset, length in sorted(zip(offsets, lengths, strict=True)):
        assert offset >= end
        assert offset * itemsize % ALIGNMENT_BYTES == 0
        end = offset + length
    assert end <= numel
    assert numel * itemsize % ALIGNMENT_BYTES == 0


def assert_packed_first(layout: GatherLayout | ReduceLayout, itemsize: int) -> None:
    """Check that ``range(packed_numel)`` holds only the packed segments, each in a column of aligned width."""
    offsets = (layout.store if isinstance(layout, GatherLayout) else layout.output).offsets
    lengths = [s.padded_numel for s in layout.shards]
    step = ALIGNMENT_BYTES // itemsize
    assert layout.packed_widths == tuple(-(-lengths[i] // step) * step for i in layout.packed)
    starts = list(accumulate(layout.packed_widths, initial=0))
    assert [offsets[i] for i in layout.packed] == starts[:-1]
    assert layout.packed_numel == starts[-1]
    assert all(offsets[i] >= layout.packed_numel for i in layout.zero_copy)
