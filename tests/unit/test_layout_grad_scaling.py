"""Averaging of gradients, compared with the plain mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests._internals import ReduceOp, Reduction, divide, plan_division

WIDE = [torch.float32, torch.float64, torch.bfloat16]
NARROW = [torch.float16, torch.float8_e5m2]
NUM_RANKS = st.integers(1, 5000)
FACTORS = st.none() | st.floats(0.25, 5000)


def reduce(reduction: Reduction, gradients: torch.Tensor) -> torch.Tensor:
    """Reduce the rows of ``gradients``, one per rank, in their dtype. Rows are summed pairwise in a tree."""
    rows = gradients / reduction.pre_divide
    while len(rows) > 1:
        if len(rows) % 2:
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
        rows = rows[0::2] + rows[1::2]
    average = reduction.op is ReduceOp.AVERAGE
    return (rows[0] / len(gradients) if average else rows[0]) / reduction.post_divide


@given(st.sampled_from([*WIDE, *NARROW]), NUM_RANKS, st.booleans(), FACTORS, st.booleans())
def test_the_divisors_of_a_sum_multiply_to_the_factor_exactly(
    dtype: torch.dtype, num_ranks: int, averages: bool, factor: float | None, sum_only: bool
) -> None:
    reduction = plan_division(dtype, num_ranks, averages=averages, divide_factor=factor, sum_only=sum_only)
    if reduction.op is ReduceOp.SUM:
        assert reduction.pre_divide * reduction.post_divide == (num_ranks if factor is None else factor)


@given(st.sampled_from([*WIDE, *NARROW]), NUM_RANKS, st.booleans(), FACTORS, st.booleans())
def test_the_communicator_averages_if_supported_and_the_result_is_the_mean(
    dtype: torch.dtype, num_ranks: int, averages: bool, factor: float | None, sum_only: bool
) -> None:
    reduction = plan_division(dtype, num_ranks, averages=averages, divide_factor=factor, sum_only=sum_only)
    mean = factor is None or factor == num_ranks
    assert (reduction.op is ReduceOp.AVERAGE) == (dtype in WIDE and averages and not sum_only and mean)
    if reduction.op is ReduceOp.AVERAGE:
        assert reduction == Reduction(ReduceOp.AVERAGE, 1.0, 1.0)


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_dtypes_are_divided_once_after_the_reduce_scatter(dtype: torch.dtype) -> None:
    assert plan_division(dtype, 8, averages=False) == Reduction(ReduceOp.SUM, 1.0, 8.0)
    assert plan_division(dtype, 8, averages=True, divide_factor=3.0) == Reduction(ReduceOp.SUM, 1.0, 3.0)


@given(NUM_RANKS)
def test_fp16_is_divided_in_two_halves_of_which_the_first_is_an_exact_power_of_two(num_ranks: int) -> None:
    reduction = plan_division(torch.float16, num_ranks, averages=True)
    assert reduction.pre_divide == 2.0 ** (int(reduction.pre_divide).bit_length() - 1)
    assert reduction.pre_divide / 2 < num_ranks**0.5 <= reduction.pre_divide


@given(st.integers(1, 64), st.booleans(), st.booleans(), st.none() | st.floats(0.25, 5000), st.integers(0, 2**31))
def test_the_reduction_is_the_sum_divided_by_the_factor(
    num_ranks: int, averages: bool, sum_only: bool, factor: float | None, seed: int
) -> None:
    gradients = torch.randn(num_ranks, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = gradients.mean(0) if factor is None else gradients.sum(0) / factor
    for dtype in (torch.float64, torch.float16):  # only the plan uses this dtype; the values are fp64
        reduction = plan_division(dtype, num_ranks, averages=averages, divide_factor=factor, sum_only=sum_only)
        torch.testing.assert_close(reduce(reduction, gradients), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16, 32, 4096])
def test_divisors_for_powers_of_two_are_those_of_fsdp2(num_ranks: int) -> None:
    first = 1.0
    while num_ranks % first == 0 and num_ranks / first > first:
        first *= 2
    reduction = plan_division(torch.float16, num_ranks, averages=False)
    assert reduction == Reduction(ReduceOp.SUM, first, num_ranks / first)


BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
DIVISORS = st.integers(-130, 130).map(lambda k: 2.0**k) | st.floats(0.25, 5000) | st.integers(1, 5000).map(float)


@given(st.sampled_from(list(BITS)), DIVISORS, st.booleans(), st.integers(0, 2**32))
@example(torch.float32, 2.0**-130, False, 0)  # its reciprocal overflows in fp32
def test_divided_values_are_bitwise_those_of_a_division(
    dtype: torch.dtype, divisor: float, negative: bool, seed: int
) -> None:
    # Arbitrary bits: numbers of all magnitudes, denormal numbers, infinities. All nans are compared as equal.
    bits = torch.iinfo(BITS[dtype])
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(bits.min, bits.max, (200,), dtype=BITS[dtype], generator=generator).view(dtype)
    divisor = -divisor if negative else divisor
    expected = (values / divisor).nan_to_num(nan=1.0, posinf=torch.inf, neginf=-torch.inf)
    divided = values.clone()
    assert divide(divided, divisor) is divided
    divided.nan_to_num_(nan=1.0, posinf=torch.inf, neginf=-torch.inf)
    assert torch.equal(divided.view(BITS[dtype]), expected.view(BITS[dtype]))
