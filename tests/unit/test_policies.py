"""Parsing of the user's options."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import policies
from composable_fsdp.errors import ConfigurationError, FSDPError
from composable_fsdp.policies import (
    AUTO_RESHARD,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Reshard,
    ReshardKind,
    cpu_offload_by_budget,
)

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NOT_FLOATING = [torch.int8, torch.int64, torch.bool, torch.complex64]
FLOAT_OR_NONE = st.sampled_from([None, *FLOATING])
POLICIES = st.builds(MixedPrecisionPolicy, FLOAT_OR_NONE, FLOAT_OR_NONE, FLOAT_OR_NONE, st.booleans())


@pytest.mark.parametrize(
    ("value", "shard_size", "expected"),
    [
        (None, 4, AUTO_RESHARD),
        (True, 4, Reshard(ReshardKind.ALWAYS)),
        (False, 4, Reshard(ReshardKind.NEVER)),
        (4, 4, Reshard(ReshardKind.ALWAYS)),
        (1, 4, Reshard(ReshardKind.NEVER)),
        (2, 4, Reshard(ReshardKind.SMALLER, 2)),
        (3, 12, Reshard(ReshardKind.SMALLER, 3)),
        (True, 1, Reshard(ReshardKind.ALWAYS)),
        (1, 1, Reshard(ReshardKind.NEVER)),
    ],
)
def test_reshard_after_forward_is_parsed_to_a_kind(value: object, shard_size: int, expected: Reshard) -> None:
    assert Reshard.parse(value, shard_size) == expected


@pytest.mark.parametrize("value", [3, 5, 12, 0, -2])
def test_a_mesh_that_does_not_divide_the_shard_axis_is_an_error_with_those_that_do(value: int) -> None:
    message = (
        f"reshard_after_forward={value} does not divide the shard axis of 8 ranks. "
        "Use one of [1, 2, 4, 8], True or False."
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        Reshard.parse(value, 8)


@pytest.mark.parametrize(("value", "shown"), [("yes", "'yes' (str)"), (2.0, "2.0 (float)"), ([2], "[2] (list)")])
def test_an_invalid_reshard_after_forward_is_shown_with_its_type(value: object, shown: str) -> None:
    message = f"reshard_after_forward must be True, False, None or an int, not {shown}."
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$") as caught:
        Reshard.parse(value, 8)
    assert isinstance(caught.value, FSDPError)
    assert isinstance(caught.value, ValueError)


@given(POLICIES, st.sampled_from(FLOATING + NOT_FLOATING))
def test_floating_parameters_compute_in_param_dtype_and_reduce_in_reduce_dtype_and_others_are_never_cast(
    policy: MixedPrecisionPolicy, original: torch.dtype
) -> None:
    compute = original if original in NOT_FLOATING else policy.param_dtype or original
    assert policy.compute_dtype(original) == compute
    reduced = original if original in NOT_FLOATING else policy.reduce_dtype or compute
    assert policy.gradient_reduce_dtype(compute, compute) == reduced


@pytest.mark.parametrize(("is_new", "reduced"), [(False, torch.bfloat16), (True, torch.float32)])
def test_without_reduce_dtype_the_installed_torch_decides(
    monkeypatch: pytest.MonkeyPatch, is_new: bool, reduced: torch.dtype
) -> None:
    monkeypatch.setattr(policies, "_REDUCES_IN_GRADIENT_DTYPE", is_new)
    policy = MixedPrecisionPolicy(torch.bfloat16)
    assert policy.gradient_reduce_dtype(torch.bfloat16, torch.float32) == reduced
    assert policy.gradient_reduce_dtype(torch.bfloat16, torch.bfloat16) == torch.bfloat16
    chosen = MixedPrecisionPolicy(torch.bfloat16, torch.float16)
    assert chosen.gradient_reduce_dtype(torch.bfloat16, torch.float32) == torch.float16
    kept = MixedPrecisionPolicy(torch.bfloat16, grad_dtype=torch.float32)
    assert kept.gradient_reduce_dtype(torch.bfloat16, torch.float32) == torch.float32


@pytest.mark.behaviour("D-02")
def test_a_budget_offloads_the_largest_parameters_that_fit() -> None:
    sizes = {"b": 25, "d": 25, "a": 10, "c": 7}  # elements of 4 bytes
    modules = [
        nn.ParameterDict({name: nn.Parameter(torch.zeros(sizes[name])) for name in order}) for order in ("bdac", "cadb")
    ]
    expected = [
        (0, ""),
        (99, ""),
        (100, "b"),
        (199, "b"),
        (200, "bd"),
        (240, "bda"),
        (267, "bda"),
        (268, "bdac"),
        (10**9, "bdac"),
    ]
    for budget, chosen in expected:
        for module in modules:
            assert list(cpu_offload_by_budget(module, budget)) == list(chosen), budget
    pinned = {policy.pin_memory for policy in cpu_offload_by_budget(modules[0], 240, pin_memory=False).values()}  # type: ignore[attr-defined]
    assert pinned == {False}
    assert set(cpu_offload_by_budget(modules[0], 240).values()) == {CPUOffloadPolicy()}
    half = {"w": nn.Parameter(torch.zeros(10, dtype=torch.bfloat16)), "v": nn.Parameter(torch.zeros(6))}
    assert list(cpu_offload_by_budget(nn.ParameterDict(half), 24)) == ["v"]
    with pytest.raises(ConfigurationError, match="budget_bytes must be non-negative, not -1"):
        cpu_offload_by_budget(modules[0], -1)
