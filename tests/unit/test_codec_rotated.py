"""Rotated blocks: the Hadamard transform, its error bound, and the smaller error with outliers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp.codecs.blockwise import Int4, Int8
from composable_fsdp.errors import ConfigurationError
from tests._internals import hadamard_
from tests.helpers.codec_rows import FLOAT, ROTATED, finite_rows, round_trip


def matrix(block: int) -> torch.Tensor:
    """Return Sylvester's Hadamard matrix, normalised."""
    out = torch.ones(1, 1, dtype=torch.float64)
    while out.size(0) < block:
        out = torch.cat([torch.cat([out, out], dim=1), torch.cat([out, -out], dim=1)])
    return out / math.sqrt(block)


def in_blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Reshape to fp64 ``(num_rows, num_blocks, block)``. The last block is padded with zeros."""
    padded = torch.nn.functional.pad(rows.double(), (0, -rows.size(1) % block))
    return padded.view(rows.size(0), padded.size(1) // block, block)


def heavy_tailed() -> torch.Tensor:
    """Draw from Student's t with three degrees of freedom: a normal over the root of a mean of three squares."""
    generator = torch.Generator().manual_seed(7)
    chi_square = torch.randn(3, 4, 4096, generator=generator).square().sum(0)
    return torch.randn(4, 4096, generator=generator) / (chi_square / 3).sqrt()


def mean_squared_error(codec: Any, rows: torch.Tensor) -> float:
    return float((round_trip(codec, rows) - rows).square().mean())


@pytest.mark.parametrize("block", [1, 2, 4, 8, 64, 512])
@given(rows=st.integers(1, 3), blocks=st.integers(0, 3), seed=st.integers(0, 100))
@settings(max_examples=10)
def test_the_hadamard_transform_equals_the_matrix_and_is_its_own_inverse(
    block: int, rows: int, blocks: int, seed: int
) -> None:
    integers = torch.randint(-127, 128, (rows, blocks * block), generator=torch.Generator().manual_seed(seed)).float()
    expected = (in_blocks(integers, block) @ (matrix(block) * math.sqrt(block)).round()).view(rows, blocks * block)
    once = hadamard_(integers.clone(), block)
    assert torch.equal(once.double(), expected)
    assert torch.equal(hadamard_(once, block), integers * block)


@pytest.mark.behaviour("E-08")
@pytest.mark.parametrize("codec", ROTATED, ids=repr)
@settings(max_examples=80)
@given(rows=finite_rows())
def test_the_error_of_a_rotated_block_of_any_finite_values_is_bounded(codec: Any, rows: torch.Tensor) -> None:
    decoded = round_trip(codec, rows)
    assert decoded.isfinite().all()
    exact, block = in_blocks(rows, codec.block), codec.block
    error = torch.linalg.vector_norm(in_blocks(decoded, block) - exact, dim=2)
    half_step = (exact @ matrix(block)).abs().amax(dim=2) / (2 * (127 if isinstance(codec, Int8) else 7))
    roundings = 1e-6 * torch.linalg.vector_norm(exact, dim=2) + FLOAT.tiny * block
    assert (error <= math.sqrt(block) * half_step * (1 + 1e-5) + roundings).all(), (error, math.sqrt(block) * half_step)


@pytest.mark.behaviour("E-08")
@pytest.mark.parametrize("kind", [Int8, Int4])
def test_rotation_leaves_a_quarter_of_the_squared_error_of_heavy_tailed_values(kind: Any) -> None:
    rows = heavy_tailed()
    for block in (128, 256):
        rotated, plain = (mean_squared_error(kind(block, rotate=rotate), rows) for rotate in (True, False))
        assert rotated < plain / 4


@pytest.mark.behaviour("E-08")
def test_one_outlier_does_not_spoil_its_block() -> None:
    rows = torch.ones(1, 128)
    rows[0, 5] = 100.0
    others = torch.arange(128) != 5
    assert (round_trip(Int4(128), rows)[0, others] == 0).all()
    assert (round_trip(Int4(128, rotate=True), rows)[0, others] > 0.5).all()


@pytest.mark.behaviour("E-08")
def test_codecs_send_full_blocks() -> None:
    for numel, blocks in ((0, 0), (1, 1), (256, 1), (257, 2)):
        assert Int8(256, rotate=True).payload_bytes(numel) == blocks * (256 + 4)
        assert Int4(256, rotate=True).payload_bytes(numel) == blocks * (128 + 4)


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_a_block_that_is_no_power_of_two_cannot_be_rotated(kind: Any) -> None:
    assert kind(96).block == 96
    with pytest.raises(ConfigurationError, match="with rotate=True, a block must be a power of two, not 96"):
        kind(96, rotate=True)
    with pytest.raises(ConfigurationError, match="a whole number of elements, at least one, not 0"):
        kind(0, rotate=True)
