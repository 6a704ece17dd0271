"""Codecs with other features: exceptions, callables, streams, several roots, smaller meshes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import (
    Cast,
    CommunicationPolicy,
    Float8,
    Int8,
    describe,
    fully_shard,
)
from tests._internals import (
    CommStream,
    Encoder,
    ShardedParameter,
    core_reduce,
    take_gradients,
)
from tests.helpers.run_ranks import on_ranks

EXACT = Cast(torch.float32)


def layers(policy: CommunicationPolicy | None, *, root: bool = True, **options: Any) -> Any:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer, comm_policy=policy, **options)
    return fully_shard(model, comm_policy=policy, **options) if root else model


def backward(model: Any, step: int = 0) -> None:
    seed = 97 * step + dist.get_rank()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters()]


class OneBuffer:
    def __init__(self) -> None:
        self.memory = torch.empty(1 << 14, dtype=torch.uint8)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.memory[: size[0] * dtype.itemsize].view(dtype)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **options: Any) -> None:
        raise AssertionError("encoded gradients must not use this collective")


@pytest.mark.behaviour("E-09")
@on_ranks(2)
def test_encoded_gradients_do_not_take_memory_of_a_custom_reduce_scatter() -> None:
    model, plain = layers(CommunicationPolicy(reduce_scatter=EXACT, min_numel=1)), layers(None)
    for layer in (model[0], model[2]):
        layer.set_custom_reduce_scatter(OneBuffer())
    for step in range(3):
        backward(model, step)
        backward(plain, step)
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.behaviour("E-09")
@on_ranks(2)
def test_user_hooks_see_no_uninitialised_memory() -> None:
    model = layers(CommunicationPolicy(reduce_scatter=EXACT, min_numel=1))
    finite: list[bool] = []
    for layer in (model[0], model[2]):
        layer.set_all_reduce_hook(lambda output: finite.append(bool(output.isfinite().all())))
    backward(model)
    torch.use_deterministic_algorithms(True)  # unwritten memory is nan then
    backward(model)
    torch.use_deterministic_algorithms(False)
    assert finite == [True] * 4


class Rows(nn.Module):
    """Two parameters with unaligned rows of 33 elements; large and small ones alternate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        magnitudes = 1e7 ** (torch.arange(10) % 2).unsqueeze(1)
        self.first, self.second = (nn.Parameter(torch.randn(10, 33) * magnitudes) for _ in range(2))

    def forward(self) -> torch.Tensor:
        rows = torch.arange(1.0, 11).unsqueeze(1)
        return ((self.first + self.second) * 1e7 ** (rows % 2) * rows).sum()


@pytest.mark.behaviour("E-08", "E-09")
@on_ranks(2)
def test_rows_of_every_parameter_have_scales_of_their_own() -> None:
    model: Any = Rows()
    exact = [p.detach().clone() for p in model.parameters()]
    codec = Float8(per_row=True)
    fully_shard(model, comm_policy=CommunicationPolicy(codec, codec, min_numel=1))
    model.unshard()
    for parameter, expected in zip(model.parameters(), exact, strict=True):
        errors = (parameter - expected).abs().amax(1) / expected.abs().amax(1)
        assert errors.max() <= 1 / 16, errors
    model().backward()
    rows = torch.arange(1.0, 11).unsqueeze(1)
    expected = (rows * 1e7 ** (rows % 2)).expand(10, 33)
    for gradient in gradients(model):
        torch.testing.assert_close(gradient, expected.contiguous(), rtol=1 / 16, atol=0)


@pytest.mark.behaviour("E-09")
@on_ranks(2)
def test_gradients_are_encoded_on_the_current_stream_and_freed_before_communication() -> None:
    """Check that gradients are read on the stream that wrote them, before the communication stream runs, then freed."""
    happened: list[str] = []
    taken: list[weakref.ref[torch.Tensor]] = []
    take, encode, run = take_gradients, Encoder.encode, CommStream.run

    def watched_take(parameters: Sequence[ShardedParameter], sum_dtype: torch.dtype) -> list[torch.Tensor | None]:
        gradients = take(parameters, sum_dtype)
        taken.extend(weakref.ref(gradient) for gradient in gradients if gradient is not None)
        return gradients

    def watched_encode(self: Encoder, *args: Any) -> None:
        happened.append("encode")
        encode(self, *args)

    def watched_run(self: CommStream, *args: Any, **options: Any) -> Any:
        if taken:
            happened.append(self.name)
            assert all(gradient() is None for gradient in taken)
        return run(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_reduce, "take_gradients", watched_take)
        patch.setattr(Encoder, "encode", watched_encode)
        patch.setattr(CommStream, "run", watched_run)
        model = fully_shard(nn.Linear(6, 5), comm_policy=CommunicationPolicy(reduce_scatter=Int8(), min_numel=1))
        backward(model)
    assert happened == ["encode", "reduce"]


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.root, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.root(x))


@pytest.mark.behaviour("C-01")
@on_ranks(2)
def test_a_module_may_be_called_root() -> None:
    model = Rooted()
    fully_shard(model.root)
    fully_shard(model)
    model(torch.randn(2, 6)).sum().backward()
    assert {group.names[0] for group in describe(model).groups} == {"", "root"}
