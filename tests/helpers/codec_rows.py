"""Hypothesis strategies for rows of floating-point values, and their round trip through a codec."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

FLOAT = torch.finfo(torch.float32)
SMALLEST = 2.0**-149
EXTREMES = st.sampled_from(
    [0.0, -0.0, FLOAT.max, -FLOAT.max, 1e38, FLOAT.tiny, SMALLEST, -SMALLEST, 1.0, 0.9999, -3e-41]
)


VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False) | EXTREMES


@st.composite
def finite_rows(draw: st.DrawFn) -> torch.Tensor:
    """Draw either a few values, or rows near the block size in length with values of random magnitudes."""
    if draw(st.booleans()):
        numel = draw(st.integers(0, 40))
        rows = draw(st.lists(st.lists(VALUES, min_size=numel, max_size=numel), min_size=1, max_size=3))
        return torch.tensor(rows, dtype=torch.float32)
    shape = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 127, 128, 129, 255, 256, 257, 511, 513]))
    lowest, highest = draw(st.sampled_from([(-45, 39), (-2, 2), (36, 39), (-45, -36)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(lowest, highest, shape, generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**exponents
    return values.clamp(-FLOAT.max, FLOAT.max).float()


def round_trip(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    before = rows.clone()
    payload = codec.encode(rows)
    assert payload.dtype == torch.uint8
    assert payload.is_contiguous()
    assert payload.shape == (rows.size(0), codec.payload_bytes(rows.size(1)))
    sent = payload.clone()
    decoded: torch.Tensor = codec.decode(payload, rows.size(1))
    assert decoded.shape == rows.shape
    assert decoded.dtype == torch.float32
    assert torch.equal(payload, sent)
    torch.testing.assert_close(rows, before, rtol=0, atol=0, equal_nan=True)
    return decoded
