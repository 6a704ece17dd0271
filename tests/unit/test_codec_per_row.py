"""Float8 with one scale per row of a parameter. The codec needs the parameter's shape."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.codecs.blockwise import Int4, Int8
from composable_fsdp.codecs.cast import Cast
from composable_fsdp.codecs.float8 import Float8
from composable_fsdp.codecs.protocol import resolve_codec
from composable_fsdp.errors import ConfigurationError


@pytest.mark.parametrize(
    ("shape", "block"), [((6, 10), 10), ((6, 3, 2, 2), 12), ((6, 1), 1), ((7,), 7), ((), 1), ((0, 4), 4), ((4, 0), 1)]
)
def test_a_row_is_what_an_index_of_the_first_dim_selects(shape: tuple[int, ...], block: int) -> None:
    resolved = resolve_codec(Float8(per_row=True), torch.Size(shape))
    assert resolved == Float8(block=block)
    assert resolve_codec(resolved, shape) == resolved


@pytest.mark.parametrize("codec", [Float8(), Float8(block=3), Int8(), Int4(), Cast()], ids=repr)
def test_other_codecs_do_not_depend_on_the_parameter(codec: Any) -> None:
    assert resolve_codec(codec, (6, 10)) is codec


@pytest.mark.behaviour("E-08")
@given(num_rows=st.integers(1, 5), length=st.integers(1, 9), seed=st.integers(0, 100))
def test_the_error_of_a_row_does_not_depend_on_other_rows(num_rows: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10.0 ** torch.randint(-20, 20, (num_rows, 1), generator=generator)
    parameter = torch.randn(num_rows, length, generator=generator) * magnitudes
    codec = resolve_codec(Float8(per_row=True), parameter.shape)
    payload = codec.encode(parameter.view(1, -1))
    alone = Float8().decode(Float8().encode(parameter), length)
    assert torch.equal(codec.decode(payload, parameter.numel()).view_as(parameter), alone)
    assert payload.numel() == -(-parameter.numel() // 4) * 4 + 4 * num_rows


def test_a_per_row_codec_without_a_parameter_encodes_nothing() -> None:
    codec = Float8(per_row=True)
    uses = (
        lambda: codec.encode(torch.ones(1, 4)),
        lambda: codec.decode(torch.zeros(1, 8, dtype=torch.uint8), 4),
        lambda: codec.payload_bytes(4),
    )
    for use in uses:
        with pytest.raises(ConfigurationError, match=r"how long a row is. Call for_parameter\(shape\)"):
            use()


def test_block_and_per_row_scales_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("Float8 takes block=4 or per_row=True, not both.")):
        Float8(block=4, per_row=True)
