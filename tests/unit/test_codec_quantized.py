"""Error bounds of all codecs for any values, and independence of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp.codecs.blockwise import Int4, Int8
from composable_fsdp.codecs.cast import Cast
from composable_fsdp.codecs.float8 import Float8
from composable_fsdp.errors import ConfigurationError
from tests.helpers.codec_rows import FLOAT, finite_rows, round_trip

BLOCKWISE = [Int8(), Int8(block=5), Int8(block=1), Int4(), Int4(block=3), Float8(), Float8(block=7), Float8(block=256)]
CASTS = [Cast(), Cast(torch.float16)]
CODECS = BLOCKWISE + CASTS

codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)
scaling = pytest.mark.parametrize("codec", BLOCKWISE, ids=repr)


def largest_of_block(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each element's block, in the shape of ``rows``."""
    block = codec.block or max(1, rows.size(1))
    out = torch.zeros_like(rows)
    for start in range(0, rows.size(1), block):
        part = rows[:, start : start + block]
        out[:, start : start + block] = part.abs().amax(dim=1, keepdim=True)
    return out


def bound(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the documented error bound, plus tolerances for the rounding of the scale and for values near zero."""
    if isinstance(codec, Cast):
        info = torch.finfo(codec.dtype)
        fits = rows.abs() <= info.max
        return torch.where(fits, rows.abs().double() * info.eps / 2 + info.smallest_normal, torch.inf)
    largest = largest_of_block(codec, rows).double()
    if isinstance(codec, Float8):
        error = torch.maximum(rows.abs().double() / 16, largest / 2**18)
    else:
        error = largest / (2 * (127 if isinstance(codec, Int8) else 7))
    return error * (1 + 1e-5) + FLOAT.tiny * (448 if isinstance(codec, Float8) else 127)


@pytest.mark.behaviour("E-08")
@pytest.mark.parametrize("codec", BLOCKWISE + CASTS, ids=repr)
@settings(max_examples=60)
@given(rows=finite_rows())
def test_the_error_of_any_finite_values_is_bounded(codec: Any, rows: torch.Tensor) -> None:
    error = (round_trip(codec, rows).double() - rows.double()).abs()
    assert (error <= bound(codec, rows)).all(), (error, bound(codec, rows))


@pytest.mark.behaviour("E-08")
@scaling
@settings(max_examples=30)
@given(rows=finite_rows(), data=st.data())
def test_a_block_with_nan_or_infinity_is_nan_and_others_are_unchanged(
    codec: Any, rows: torch.Tensor, data: st.DataObject
) -> None:
    if not rows.numel():
        return
    bad = torch.zeros_like(rows, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, rows.size(0) - 1)), data.draw(st.integers(0, rows.size(1) - 1))] = True
    in_bad_blocks = largest_of_block(codec, bad.float()) > 0
    broken = rows.masked_fill(bad, data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf])))
    expected = round_trip(codec, rows).masked_fill(in_bad_blocks, torch.nan)
    torch.testing.assert_close(round_trip(codec, broken), expected, rtol=0, atol=0, equal_nan=True)
    # The conversion of nan to an integer depends on the machine. Payloads must not depend on it: all non-finite values
    # have the same payload.
    assert torch.equal(codec.encode(broken), codec.encode(rows.masked_fill(bad, -torch.inf)))


@pytest.mark.behaviour("E-08")
@pytest.mark.parametrize("codec", CASTS, ids=repr)
def test_a_cast_keeps_nan_and_infinity_where_they_are(codec: Cast) -> None:
    rows = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 0.0]])
    torch.testing.assert_close(round_trip(codec, rows), rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.behaviour("E-08")
@codecs
@settings(max_examples=40)
@given(rows=finite_rows())
def test_blocks_do_not_span_rows_of_several_ranks(codec: Any, rows: torch.Tensor) -> None:
    payload, numel = codec.encode(rows), rows.size(1)
    assert torch.equal(payload, torch.cat([codec.encode(row.unsqueeze(0)) for row in rows]))
    decoded = codec.decode(payload, numel)
    assert torch.equal(decoded, torch.cat([codec.decode(row.clone().unsqueeze(0), numel) for row in payload]))


@pytest.mark.behaviour("E-08")
@codecs
def test_decoded_values_are_encoded_again_without_loss(codec: Any) -> None:
    rows = torch.randn(3, 512, generator=torch.Generator().manual_seed(3))
    once = round_trip(codec, rows)
    torch.testing.assert_close(round_trip(codec, once), once, rtol=1e-5, atol=1e-5)


@pytest.mark.behaviour("E-08")
@codecs
def test_payloads_may_be_columns_and_values_may_have_another_dtype(codec: Any) -> None:
    rows = torch.randn(2, 37, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(rows)
    wide = torch.zeros(2, payload.size(1) + 24, dtype=torch.uint8)
    wide[:, 8 : 8 + payload.size(1)] = payload
    assert torch.equal(codec.decode(wide[:, 8 : 8 + payload.size(1)], 37), codec.decode(payload, 37))
    assert torch.equal(codec.encode(rows.repeat(1, 2)[:, :37]), payload)
    for half in (rows.bfloat16(), rows.half()):
        assert torch.equal(round_trip(codec, half), round_trip(codec, half.float()))
    torch.testing.assert_close(round_trip(codec, rows.double()), round_trip(codec, rows), rtol=1e-6, atol=1e-6)


@pytest.mark.behaviour("E-08")
def test_encoded_sizes_follow_from_the_number_of_bits() -> None:
    assert Int8(block=256).payload_bytes(1024) == 1024 + 4 * 4
    assert Int4(block=128).payload_bytes(1024) == 512 + 4 * 8
    assert Float8().payload_bytes(1024) == 1024 + 4
    assert Cast().payload_bytes(1024) == 2048
    assert Int4(block=4).payload_bytes(5) == 4 + 4 * 2  # three bytes, padded to the alignment of a scale
    assert Float8().payload_bytes(0) == Float8(block=3).payload_bytes(0) == Int8().payload_bytes(0) == 0


@pytest.mark.parametrize("kind", [Int8, Int4, Float8])
def test_an_empty_block_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="a block is a whole number of elements, at least one, not 0"):
        kind(block=0)


def test_a_cast_to_more_than_16_bits_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"Cast takes torch.bfloat16, torch.float16 or torch.float32, not torch.f"
    ):
        Cast(torch.float64)
