"""The plan of a group: its buckets and the all-gather from a smaller mesh."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp import CPUOffloadPolicy, OffloadPolicy
from tests._internals import (
    GatherClaim,
    GroupPlan,
    ParameterSpec,
    PlanOptions,
    TensorShards,
    plan_group,
    plan_slices,
    traits_of,
)
from tests.helpers.layouts import (
    DIRECT_BYTES,
    SHAPES,
    WORLD_SIZES,
    assert_disjoint_and_aligned,
    assert_sent_layout,
    spec_of,
)

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


# Groups are slow to draw, and test_layout_bucket tests single buckets.
FEWER = settings(max_examples=40)
SPECS = st.lists(parameter_specs(), min_size=1, max_size=6).map(tuple)
OPTIONS = st.builds(PlanOptions, WORLD_SIZES, DIRECT_BYTES, DIRECT_BYTES)
ALIASING = st.builds(PlanOptions, st.just(1), DIRECT_BYTES, DIRECT_BYTES, st.just(True))


@FEWER
@given(SPECS, OPTIONS | ALIASING)
def test_every_parameter_is_in_exactly_one_bucket_and_that_has_its_dtypes(
    specs: tuple[ParameterSpec, ...], options: PlanOptions
) -> None:
    plan = plan_group(specs, (options,))
    assert plan.specs == specs
    assert sorted(i for bucket in plan.buckets for i in bucket.indices) == list(range(len(specs)))
    keys = [{traits_of(specs[i]) for i in bucket.indices} for bucket in plan.buckets]
    assert [len(of_bucket) for of_bucket in keys] == [1] * len(keys)
    assert len(set().union(*keys)) == len(keys)
    assert [{traits_of(bucket)} for bucket in plan.buckets] == keys


@FEWER
@given(SPECS, OPTIONS)
def test_a_bucket_shards_its_parameters_by_their_specs(specs: tuple[ParameterSpec, ...], options: PlanOptions) -> None:
    for bucket in plan_group(specs, (options,)).buckets:
        expected = tuple(TensorShards(specs[i].shape, specs[i].dim, options.num_shards) for i in bucket.indices)
        assert bucket.gather.shards == expected


@FEWER
@given(SPECS, OPTIONS)
def test_exactly_the_trainable_parameters_are_reduced(specs: tuple[ParameterSpec, ...], options: PlanOptions) -> None:
    plan = plan_group(specs, (options,))
    for bucket in plan.buckets:
        assert [bucket.indices[k] for k in bucket.reduce.indices] == [i for i in bucket.indices if specs[i].trainable]
    assert plan.num_trainable == sum(len(bucket.reduce.indices) for bucket in plan.buckets)


@FEWER
@given(SPECS, ALIASING)
def test_an_axis_of_one_rank_aliases_exactly_the_buckets_without_cast(
    specs: tuple[ParameterSpec, ...], options: PlanOptions
) -> None:
    for bucket in plan_group(specs, (options,)).buckets:
        is_offloaded = isinstance(bucket.offload, CPUOffloadPolicy)
        assert bucket.is_gathered == (bucket.dtype != bucket.compute_dtype or is_offloaded)
        if not bucket.is_gathered:
            assert all(s.padded_numel == s.full_numel == s.numel for s in bucket.gather.shards)
            assert (bucket.unsharded_bytes, bucket.wire_bytes) == (0, 0)


@FEWER
@given(SPECS, st.integers(2, 4))
def test_claimed_parameters_have_buckets_of_their_own_and_take_memory_if_they_are_gathered(
    specs: tuple[ParameterSpec, ...], num_shards: int
) -> None:
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


@FEWER
@given(SPECS, st.sampled_from([(8, 4), (8, 2), (6, 3), (6, 2), (9, 3), (4, 2), (5, 1)]), DIRECT_BYTES)
def test_a_smaller_mesh_gathers_to_the_offsets_of_the_full_mesh(
    specs: tuple[ParameterSpec, ...], sizes: tuple[int, int], zero_copy_min_bytes: int
) -> None:
    larger, smaller = sizes
    for bucket in plan_group(specs, (PlanOptions(larger, zero_copy_min_bytes, zero_copy_min_bytes),)).buckets:
        layout = plan_slices(bucket, smaller, zero_copy_min_bytes).gather
        itemsize = bucket.compute_dtype.itemsize
        assert layout.places is bucket.gather.places
        assert [(s.shape, s.dim) for s in layout.shards] == [(s.shape, s.dim) for s in bucket.gather.shards]
        assert all(s.num_shards == smaller for s in layout.shards)
        full_lengths = [s.full_numel for s in layout.shards]
        assert_disjoint_and_aligned(layout.places.offsets, full_lengths, layout.places.numel, itemsize)
        for small, large in zip(layout.shards, bucket.gather.shards, strict=True):
            assert small.full_numel <= large.full_numel
        assert_sent_layout(layout, itemsize)


def test_equal_plans_are_cached() -> None:
    def make_plan(trainable: bool) -> GroupPlan:
        dtype = torch.float32
        return plan_group((spec_of("w", (4, 4), 0, dtype, trainable),), (PlanOptions(2, 0, 0),))

    assert make_plan(True) is make_plan(True)
    assert make_plan(True) is not make_plan(False)


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
