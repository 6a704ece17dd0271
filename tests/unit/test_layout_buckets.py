"""Offsets of tensors in stores, messages and buffers, plans of groups, pinned memory, and division of gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composable_fsdp import CPUOffloadPolicy, OffloadPolicy
from tests._internals import (
    ALIGNMENT_BYTES,
    BucketReducer,
    GatherClaim,
    ParameterSpec,
    PlanOptions,
    ReduceOp,
    ReduceScatterBuffers,
    Reduction,
    TensorShards,
    cut_pinned,
    divide,
    pinned_bytes,
    plan_division,
    plan_gather,
    plan_group,
    plan_reduce,
    split_at,
    traits_of,
)
from tests.helpers.layouts import (
    DIRECT_BYTES,
    MOST_PADDING,
    NEVER_ZERO_COPY,
    SHAPES,
    WORLD_SIZES,
    assert_disjoint_and_aligned,
    assert_sent_layout,
    shards_of_one_bucket,
    spec_of,
)

FEWER = settings(max_examples=40)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def assert_partition(parts: Iterable[tuple[int, ...]], numbers: range) -> None:
    assert sorted(i for part in parts for i in part) == list(numbers)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans())
def test_an_all_gather_sends_packed_segments_and_large_tensors_to_aligned_places_with_little_padding(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int, encoded: bool
) -> None:
    layout = plan_gather(shards, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, encoded=encoded)
    assert_partition((layout.zero_copy, layout.packed), range(len(shards)))
    assert_sent_layout(layout, itemsize, encoded=encoded)
    lengths = [s.full_numel for s in shards]
    assert_disjoint_and_aligned(layout.places.offsets, lengths, layout.places.numel, itemsize)
    for i, s in enumerate(shards):
        is_large = s.concatenates and s.numel > 0 and s.numel * itemsize >= zero_copy_min_bytes
        assert (i in layout.zero_copy) == is_large
        assert not is_large or s.full_numel == s.padded_numel * layout.num_shards
    sent = layout.num_shards * sum(s.padded_numel for s in shards)
    assert encoded or 0 <= layout.wire_numel - sent <= MOST_PADDING * sent


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans(), st.booleans(), st.data())
def test_the_output_of_a_reduction_has_the_packed_segments_and_flags_in_front_without_gaps_that_would_add_much(
    shards: tuple[TensorShards, ...],
    itemsize: int,
    zero_copy_min_bytes: int,
    flags: bool,
    encoded: bool,
    data: st.DataObject,
) -> None:
    indices = data.draw(st.sets(st.integers(0, len(shards) - 1)).map(sorted))
    layout = plan_reduce(
        *(shards, indices), itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, flags=flags, encoded=encoded
    )
    assert layout.indices == tuple(indices)
    assert layout.shards == tuple(shards[i] for i in indices)
    assert_partition((layout.zero_copy, layout.packed), range(len(indices)))
    assert_sent_layout(layout, itemsize, encoded=encoded)


@given(shards_of_one_bucket(), ITEMSIZES, DIRECT_BYTES, st.booleans())
def test_padding_is_noted_exactly_if_there_is_some_and_flags_are_the_last_segment_of_the_packed_message(
    shards: tuple[TensorShards, ...], itemsize: int, zero_copy_min_bytes: int, flags: bool
) -> None:
    indices = range(len(shards))
    layout = plan_reduce(shards, indices, itemsize=itemsize, zero_copy_min_bytes=zero_copy_min_bytes, flags=flags)
    assert_partition((layout.zero_copy, layout.packed), indices)
    assert layout.flags_width == (layout.packed_widths[-1] if flags else 0) >= layout.num_flags
    assert layout.gradient_numel == sum(layout.packed_widths[: len(layout.packed)])
    if flags:
        assert layout.flags_offset == layout.gradient_numel
    else:
        message_numel = shards[0].num_shards * layout.packed_numel
        assert bool(layout.gaps or layout.most_uneven) == (message_numel > sum(shards[k].numel for k in layout.packed))


@pytest.mark.parametrize(("encoded", "second"), [(False, 1), (True, ALIGNMENT_BYTES // 2)])
def test_lone_elements_lie_side_by_side_unless_a_codec_encodes_them(encoded: bool, second: int) -> None:
    two = [TensorShards((1,), 0, 1)] * 2
    layout = plan_gather(two, itemsize=2, zero_copy_min_bytes=NEVER_ZERO_COPY, encoded=encoded)
    assert layout.store.offsets == (0, second)
    assert (layout.store.numel, layout.places.offsets) == (2 * second, (0, ALIGNMENT_BYTES // 2))


def test_a_tiny_module_on_many_ranks_sends_what_it_has() -> None:
    """A row of a weight of 64 by 64 and an element of its bias, on 4096 ranks: FSDP2's messages have no gaps either."""
    shards = [TensorShards((64, 64), 0, 4096), TensorShards((64,), 0, 4096)]
    gather = plan_gather(shards, itemsize=2, zero_copy_min_bytes=NEVER_ZERO_COPY)
    reduce = plan_reduce(shards, [0, 1], itemsize=4, zero_copy_min_bytes=NEVER_ZERO_COPY, flags=True)
    assert (gather.packed_widths, reduce.packed_widths) == ((64, 1), (64, 1, 2))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6), st.integers(0, 3), st.randoms())
def test_pieces_are_the_intervals_and_the_gaps_between_them(gaps_and_lengths, last_gap: int, random: Random) -> None:
    intervals, end = [], 0
    for gap, length in gaps_and_lengths:
        intervals.append((end + gap, end + gap + length))
        end += gap + length
    random.shuffle(intervals)
    begins, ends = [begin for begin, _ in intervals], [end for _, end in intervals]
    widths, pieces = split_at(begins, ends, end + last_gap)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    assert sum(widths) == end + last_gap
    assert [(starts[i], starts[i] + widths[i]) for i in pieces] == intervals
    assert all(widths[i] for i in range(len(widths)) if i not in pieces)


DTYPES = st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64])


@st.composite
def parameter_specs(draw: st.DrawFn) -> ParameterSpec:
    shape = draw(SHAPES)
    return ParameterSpec(
        name=draw(st.sampled_from(["weight", "bias"])),
        shape=shape,
        dim=draw(st.integers(0, len(shape) - 1)),
        dtype=draw(DTYPES),
        compute_dtype=draw(DTYPES),
        reduce_dtype=draw(DTYPES),
        gradient_dtype=draw(DTYPES),
        arriving_dtype=draw(DTYPES),
        trainable=draw(st.booleans()),
        offload=draw(st.sampled_from([OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])),
    )


# Groups are slow to draw, and the tests above draw single buckets.
SPECS = st.lists(parameter_specs(), min_size=1, max_size=6).map(tuple)
OPTIONS = st.builds(PlanOptions, WORLD_SIZES, DIRECT_BYTES, DIRECT_BYTES)
ALIASING = st.builds(PlanOptions, st.just(1), DIRECT_BYTES, DIRECT_BYTES, st.just(True))


@FEWER
@given(SPECS, OPTIONS | ALIASING)
def test_every_parameter_is_in_one_bucket_with_its_dtypes_and_shards_and_reduced_if_trainable(
    specs: tuple[ParameterSpec, ...], options: PlanOptions
) -> None:
    plan = plan_group(specs, (options,))
    assert plan.specs == specs
    assert sorted(i for bucket in plan.buckets for i in bucket.indices) == list(range(len(specs)))
    keys = [{traits_of(specs[i]) for i in bucket.indices} for bucket in plan.buckets]
    assert [len(of_bucket) for of_bucket in keys] == [1] * len(keys)
    assert len(set().union(*keys)) == len(keys)
    assert [{traits_of(bucket)} for bucket in plan.buckets] == keys
    for bucket in plan.buckets:
        expected = tuple(TensorShards(specs[i].shape, specs[i].dim, options.num_shards) for i in bucket.indices)
        assert bucket.gather.shards == expected
        assert [bucket.indices[k] for k in bucket.reduce.indices] == [i for i in bucket.indices if specs[i].trainable]
    assert plan.num_trainable == sum(len(bucket.reduce.indices) for bucket in plan.buckets)


@FEWER
@given(SPECS, ALIASING)
def test_an_axis_of_one_rank_aliases_exactly_the_buckets_without_cast(specs, options: PlanOptions) -> None:
    for bucket in plan_group(specs, (options,)).buckets:
        is_offloaded = isinstance(bucket.offload, CPUOffloadPolicy)
        assert bucket.is_gathered == (bucket.dtype != bucket.compute_dtype or is_offloaded)
        if not bucket.is_gathered:
            assert all(s.padded_numel == s.full_numel == s.numel for s in bucket.gather.shards)
            assert (bucket.unsharded_bytes, bucket.wire_bytes) == (0, 0)


@FEWER
@given(SPECS, st.integers(2, 4))
def test_claimed_parameters_have_buckets_of_their_own_and_take_memory_if_they_are_gathered(specs, num_shards) -> None:
    for is_gathered in (True, False):
        claim = GatherClaim(object, "key", is_gathered)
        claimed = (*(dataclasses.replace(spec, gather_claim=claim) for spec in specs), *specs)
        for bucket in plan_group(claimed, (PlanOptions(num_shards, 1, 1),)).buckets:
            assert {i < len(specs) for i in bucket.indices} == {bucket.gather_claim == claim}
            assert bucket.is_gathered == (is_gathered or bucket.gather_claim is None)
            if bucket.is_gathered and bucket.gather_claim is not None:
                assert bucket.gather.zero_copy == ()
            assert bucket.unsharded_bytes == bucket.full_bytes * bucket.is_gathered
            assert bool(bucket.wire_bytes) == (bucket.is_gathered and bucket.full_bytes > 0)


def test_a_sum_or_gradient_in_the_reduce_dtype_is_not_rounded_on_the_wire() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    narrow = dataclasses.replace(spec_of("weight", (4, 4), 0, fp32), compute_dtype=bf16, arriving_dtype=bf16)
    summed = dataclasses.replace(narrow, name="norm", summed_before=True)

    def wire_dtype(*specs: ParameterSpec) -> torch.dtype:
        (bucket,) = plan_group(specs, (PlanOptions(2, 0, 0, widens=True),)).buckets
        return bucket.wire_dtype

    assert wire_dtype(narrow) is bf16
    assert wire_dtype(summed) is fp32
    assert wire_dtype(narrow, summed) is fp32
    wide = dataclasses.replace(narrow, arriving_dtype=fp32)
    assert wire_dtype(wide) is fp32


MIB = 1 << 20
SIZES = st.lists(st.tuples(*[st.integers(0, 40 * MIB)] * 2), min_size=1, max_size=7).map(tuple)


def taken(sizes: tuple[tuple[int, ...], ...], runs: list[range]) -> int:
    return sum(pinned_bytes(sum(sizes[k][column] for k in run)) for run in runs for column in range(len(sizes[0])))


@given(st.integers(0, 1 << 40))
def test_pinned_memory_is_the_next_power_of_two(nbytes: int) -> None:
    found = pinned_bytes(nbytes)
    assert (found == 0) == (nbytes == 0)
    assert found & (found - 1) == 0
    assert nbytes <= found < 2 * max(nbytes, 1)


@given(SIZES)
def test_runs_waste_a_tenth_or_as_little_as_any_and_no_fewer_do(sizes: tuple[tuple[int, ...], ...]) -> None:
    runs, count, total = cut_pinned(sizes), len(sizes), sum(map(sum, sizes))
    assert [k for run in runs for k in run] == list(range(count))
    every = [
        [range(begin, end) for begin, end in zip((0, *cuts), (*cuts, count), strict=True)]
        for number in range(count)
        for cuts in combinations(range(1, count), number)
    ]
    enough = max(1.1 * total, min(taken(sizes, each) for each in every))
    assert total < MIB or taken(sizes, runs) <= enough
    assert all(taken(sizes, each) > enough for each in every if len(each) < len(runs))


def planned(sizes: Sequence[int], offload: OffloadPolicy) -> tuple[int, float]:
    """Return the number of buckets of parameters of ``sizes`` in MiB on one rank, and the part that is wasted."""
    fp32 = torch.float32
    specs = tuple(
        replace(spec_of(f"{k}", (size, MIB // 4), 0, fp32), gradient_dtype=None, offload=offload)
        for k, size in enumerate(sizes)
    )
    buckets = plan_group(specs, (PlanOptions(1, 0, 0),)).buckets
    wasted = sum(pinned_bytes(bucket.shard_bytes) - bucket.shard_bytes for bucket in buckets if bucket.pins_memory)
    return len(buckets), wasted / sum(bucket.shard_bytes for bucket in buckets)


BLOCK = (64, 64, 64, 64, 172, 172, 172)
"""The weights of a transformer block, in MiB."""


def test_a_group_of_1_125_gib_wastes_at_most_a_tenth_in_few_buckets() -> None:
    sizes = (*BLOCK, *BLOCK[:4], 124)
    assert sum(sizes) * MIB == 9 << 27
    assert pinned_bytes(sum(sizes) * MIB) > 1.77 * sum(sizes) * MIB, "what one flat tensor takes"
    count, waste = planned(sizes, CPUOffloadPolicy())
    assert 1 < count <= 3
    assert waste <= 0.1
    assert planned(sizes, CPUOffloadPolicy(pin_memory=False)) == planned(sizes, OffloadPolicy()) == (1, 0.0)


def test_flags_and_norms_add_no_power_of_two() -> None:
    assert planned((64, 64), CPUOffloadPolicy()) == (1, 0.0)
    assert planned((64, 64, 1), CPUOffloadPolicy()) == (2, 0.0)


@pytest.mark.parametrize(("lengths", "direct"), [((256, 256), 1024), ((256, 512, 256), 4096), ((128, 512, 128), 1024)])
def test_gradients_are_offloaded_without_flags(lengths: tuple[int, ...], direct: int) -> None:
    """Flags are before gradients that are reduced from where they are, and after the others."""
    specs = tuple(spec_of(f"{k}", (length,), 0, torch.float32) for k, length in enumerate(lengths))
    (plan,) = plan_group(specs, (PlanOptions(2, 0, direct),)).buckets
    assert plan.reduce.num_flags
    axes = SimpleNamespace(shard=SimpleNamespace(rank=0), num_ranks=2)
    pgs: Any = SimpleNamespace(axes=axes, reduces_unused=True)
    members: Any = [object() for _ in specs]
    reducer = BucketReducer(plan, members, pgs, torch.device("cpu"), torch.device("cpu", 0), pin_memory=False)
    output = torch.arange(float(plan.reduce.output.numel))
    offsets = plan.reduce.output.offsets
    expected = [output[start : start + n // 2].clone() for start, n in zip(offsets, lengths, strict=True)]
    buffers = ReduceScatterBuffers([], output, frozenset(), torch.float32)
    gradients = reducer.finish(buffers, Reduction(ReduceOp.SUM)).gradients
    assert all(map(torch.equal, gradients, expected))
    assert gradients[0].untyped_storage().nbytes() == sum(lengths) // 2 * 4


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
def test_the_communicator_averages_if_supported_and_the_result_is_the_mean(
    dtype: torch.dtype, num_ranks: int, averages: bool, factor: float | None, sum_only: bool
) -> None:
    reduction = plan_division(dtype, num_ranks, averages=averages, divide_factor=factor, sum_only=sum_only)
    mean = factor is None or factor == num_ranks
    assert (reduction.op is ReduceOp.AVERAGE) == (dtype in WIDE and averages and not sum_only and mean)
    if reduction.op is ReduceOp.AVERAGE:
        assert reduction == Reduction(ReduceOp.AVERAGE, 1.0, 1.0)


@given(NUM_RANKS)
def test_fp16_is_divided_in_two_halves_of_which_the_first_is_an_exact_power_of_two(num_ranks: int) -> None:
    reduction = plan_division(torch.float16, num_ranks, averages=True)
    assert reduction.pre_divide == 2.0 ** (int(reduction.pre_divide).bit_length() - 1)
    assert reduction.pre_divide / 2 < num_ranks**0.5 <= reduction.pre_divide


@given(st.integers(1, 64), st.booleans(), st.booleans(), st.none() | st.floats(0.25, 5000), st.integers(0, 2**31))
def test_the_reduction_is_the_sum_divided_by_the_factor(num_ranks: int, averages, sum_only, factor, seed: int) -> None:
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
def test_divided_values_are_bitwise_those_of_a_division(dtype, divisor: float, negative: bool, seed: int) -> None:
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
