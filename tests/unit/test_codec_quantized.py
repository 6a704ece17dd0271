"""Codecs of few bits: bounds on their error for any values, and rows that know nothing of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp.codec.blockwise import Int4, Int8
from composable_fsdp.codec.cast import Cast
from composable_fsdp.codec.float8 import Float8
from composable_fsdp.errors import ConfigurationError

CODECS = [Int8(), Int8(block=5), Int4(), Int4(block=3), Float8(), Float8(block=7), Cast(), Cast(torch.float16)]
TINY = torch.finfo(torch.float32).tiny

codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def rows_of_values(draw: st.DrawFn) -> list[list[float]]:
    numel = draw(st.integers(0, 40))
    return draw(st.lists(st.lists(VALUES, min_size=numel, max_size=numel), min_size=1, max_size=3))


def round_trip(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    payload = codec.encode(rows)
    assert payload.dtype == torch.uint8
    assert payload.shape == (rows.size(0), codec.payload_bytes(rows.size(1)))
    decoded: torch.Tensor = codec.decode(payload, rows.size(1))
    assert decoded.shape == rows.shape
    return decoded


def largest_of_block(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    """For each element, the largest magnitude of its block."""
    block = codec.block or max(1, rows.size(1))
    out = torch.zeros_like(rows)
    for start in range(0, rows.size(1), block):
        part = rows[:, start : start + block]
        out[:, start : start + block] = part.abs().amax(dim=1, keepdim=True)
    return out


def bound(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    """The documented error, a hair more for the rounding of the scale, and what is too small to have one."""
    if isinstance(codec, Cast):
        info = torch.finfo(codec.dtype)
        fits = rows.abs() <= info.max
        return torch.where(fits, rows.abs().double() * info.eps / 2 + info.smallest_normal, torch.inf)
    largest = largest_of_block(codec, rows).double()
    if isinstance(codec, Float8):
        error = torch.maximum(rows.abs().double() / 16, largest / 2**18)
    else:
        error = largest / (2 * (127 if isinstance(codec, Int8) else 7))
    return error * (1 + 1e-5) + TINY * (448 if isinstance(codec, Float8) else 127)


@pytest.mark.behaviour("E-08")
@codecs
@settings(max_examples=60)
@given(rows=rows_of_values())
def test_the_error_of_any_finite_values_is_bounded(codec: Any, rows: list[list[float]]) -> None:
    exact = torch.tensor(rows, dtype=torch.float32)
    error = (round_trip(codec, exact).double() - exact.double()).abs()
    assert (error <= bound(codec, exact)).all(), (error, bound(codec, exact))


@pytest.mark.behaviour("E-08")
@pytest.mark.parametrize("codec", CODECS[:6], ids=repr)
def test_a_block_with_nan_or_infinity_is_nan_and_others_are_not(codec: Any) -> None:
    block = codec.block or 8
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows = torch.linspace(-1, 1, 2 * block).repeat(2, 1)
        rows[0, 1] = bad
        decoded = round_trip(codec, rows)
        broken = 2 * block if codec.block is None else block
        assert decoded[0, :broken].isnan().all()
        assert decoded[0, broken:].isfinite().all()
        assert decoded[1].isfinite().all()


@pytest.mark.behaviour("E-08")
@codecs
@given(st.data())
def test_rows_are_encoded_by_themselves_so_that_no_block_straddles_ranks(codec: Any, data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 40))
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
    assert torch.equal(codec.encode(rows), torch.cat([codec.encode(row.unsqueeze(0)) for row in rows]))


@pytest.mark.behaviour("E-08")
@codecs
def test_payloads_may_be_columns_of_a_larger_message_and_values_of_lower_precision(codec: Any) -> None:
    rows = torch.randn(2, 37, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(rows)
    wide = torch.zeros(2, payload.size(1) + 24, dtype=torch.uint8)
    wide[:, 8 : 8 + payload.size(1)] = payload
    assert torch.equal(codec.decode(wide[:, 8 : 8 + payload.size(1)], 37), codec.decode(payload, 37))
    half = rows.bfloat16()
    assert torch.equal(round_trip(codec, half), round_trip(codec, half.float()))


@pytest.mark.behaviour("E-08")
def test_sizes_on_the_wire_are_those_of_the_bits() -> None:
    assert Int8(block=256).payload_bytes(1024) == 1024 + 4 * 4
    assert Int4(block=128).payload_bytes(1024) == 512 + 4 * 8
    assert Float8().payload_bytes(1024) == 1024 + 4
    assert Cast().payload_bytes(1024) == 2048
    assert Int4(block=4).payload_bytes(5) == 4 + 4 * 2  # three bytes, and up to where a scale may begin


@pytest.mark.parametrize("kind", [Int8, Int4, Float8])
def test_a_block_of_nothing_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="a block must have at least one element, not 0"):
        kind(block=0)


def test_a_cast_to_more_than_16_bits_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"Cast takes torch.bfloat16, torch.float16 or torch.float32, not torch.f"
    ):
        Cast(torch.float64)
