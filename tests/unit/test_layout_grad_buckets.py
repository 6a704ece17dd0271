"""Division of a group into gradient buckets depends only on sizes and order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests._internals import GatherClaim, ParameterSpec, PlanOptions, plan_group


def spec(rows: int, **options: object) -> ParameterSpec:
    kinds = dict.fromkeys(("dtype", "compute_dtype", "reduce_dtype", "gradient_dtype"), torch.float32)
    return ParameterSpec(name="weight", shape=(rows, 4), dim=0, trainable=True, **kinds, **options)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 2000))
def test_gradient_buckets_begin_with_the_last_parameters_and_have_the_minimum_size(rows: list[int], least: int) -> None:
    plan = plan_group(tuple(map(spec, rows)), (PlanOptions(2, 0, 0, grad_bucket_bytes=least),))
    grad_bucket_of = {i: bucket.grad_bucket for bucket in plan.buckets for i in bucket.indices}
    last = len(plan.grad_buckets) - 1
    ahead = [i for i in reversed(range(len(rows))) if grad_bucket_of[i] < last]
    assert [grad_bucket_of[i] for i in ahead] == sorted(grad_bucket_of[i] for i in ahead)
    late = [i for i in range(min(ahead, default=len(rows)), len(rows)) if grad_bucket_of[i] == last]
    assert 64 * sum(rows[i] for i in late) <= sum(rows), "parameters that delay an early bucket must be small"
    sizes = [
        sum(16 * n for i, n in enumerate(rows) if grad_bucket_of[i] == grad_bucket)
        for grad_bucket in range(len(plan.grad_buckets))
    ]
    assert len(sizes) == 1 or all(size >= least for size in sizes)
    assert len(sizes) <= 5
    assert plan.grad_bucket_bytes == tuple(
        sum(2 * b.reduce.wire_numel for b in plan.buckets if b.grad_bucket == k) * 2 for k in range(last + 1)
    )
    assert sum(plan.grad_buckets) == plan.num_trainable == len(rows)


def test_encoded_parameters_stay_in_one_gradient_bucket() -> None:
    options = (PlanOptions(2, 0, 0, grad_bucket_bytes=16),)
    assert len(plan_group((spec(8), spec(8)), options).grad_buckets) == 2
    assert len(plan_group((spec(8), spec(8, gather_claim=GatherClaim(object))), options).grad_buckets) == 1


def test_the_minimum_gradient_bucket_size_is_the_largest_of_all_axes() -> None:
    of_one_rank, of_many = (PlanOptions(size, 0, 0, grad_bucket_bytes=least) for size, least in ((1, 16), (2, 1 << 20)))
    specs = (spec(8, axes=0), spec(8, axes=1), spec(8, axes=1))
    assert len(plan_group(specs, (of_one_rank, of_many)).grad_buckets) == 1
    assert len(plan_group(specs, (of_one_rank, of_one_rank)).grad_buckets) > 1
