"""Hypothesis strategies for layouts, and checks of invariants of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from hypothesis import strategies as st

from tests._internals import ALIGNMENT_BYTES, GatherLayout, ParameterSpec, ReduceLayout, TensorShards

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
    num_shards = draw(WORLD_SIZES)
    return tuple(draw(st.lists(tensor_shards(num_shards), min_size=1, max_size=5)))


def spec_of(name: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype, trainable: bool = True) -> ParameterSpec:
    """Return the spec of a parameter that is stored, computed with and reduced in ``dtype``."""
    return ParameterSpec(
        *(name, shape, dim, trainable),
        dtype=dtype,
        compute_dtype=dtype,
        reduce_dtype=dtype,
        gradient_dtype=dtype,
        arriving_dtype=dtype,
    )


NEVER_ZERO_COPY = 1 << 62
DIRECT_BYTES = st.sampled_from([0, 1, 64, 512, NEVER_ZERO_COPY])


MOST_PADDING = 1 / 64
"""The largest part of the bytes of a bucket that gaps for alignment may add."""


def assert_disjoint_and_aligned(offsets: Sequence[int], lengths: Sequence[int], numel: int, itemsize: int) -> None:
    assert len(offsets) == len(lengths)
    end = 0
    for offset, length in sorted(zip(offsets, lengths, strict=True)):
        assert offset >= end
        assert offset * itemsize % ALIGNMENT_BYTES == 0
        end = offset + length
    assert end <= numel
    assert numel * itemsize % ALIGNMENT_BYTES == 0


def assert_sent_layout(layout: GatherLayout | ReduceLayout, itemsize: int, *, encoded: bool = False) -> None:
    """Check the segments of a store, or of the output of a reduction. ``range(packed_numel)`` holds only the packed
    segments, and flags after them. All are aligned, or none of these has a gap: so it is exactly if gaps would add more
    than ``MOST_PADDING`` and nothing is encoded."""
    segments = layout.store if isinstance(layout, GatherLayout) else layout.output
    lengths, step = [s.padded_numel for s in layout.shards], ALIGNMENT_BYTES // itemsize
    packed, offsets, numbers = list(layout.packed), list(segments.offsets), range(len(lengths))
    if isinstance(layout, ReduceLayout) and layout.num_flags:
        packed.append(len(lengths))
        lengths.append(layout.num_flags)
        offsets.append(layout.flags_offset)
    sent = [lengths[i] for i in packed]
    aligned = [-(-length // step) * step for length in sent]
    has_gaps = encoded or sum(aligned) - sum(sent) <= MOST_PADDING * sum(lengths)
    assert layout.packed_widths == tuple(aligned if has_gaps else sent)
    starts = list(accumulate(layout.packed_widths, initial=0))
    assert [offsets[i] for i in packed] == starts[:-1]
    assert layout.packed_numel == starts[-1]
    others = [i for i in numbers if i not in packed]
    first = -(-starts[-1] // step) * step
    assert all(offsets[i] >= first for i in others)
    assert segments.numel == (first if others else starts[-1]) + sum(-(-lengths[i] // step) * step for i in others)
    assert_disjoint_and_aligned(
        [offsets[i] - first for i in others],
        [lengths[i] for i in others],
        segments.numel - first if others else 0,
        itemsize,
    )
