"""Test tensor subclasses that choose how their gradients are sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from composable_fsdp import CommunicationPolicy, Int4, Int8, MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ParameterError
from tests._internals import Collective, state_of
from tests.helpers.extension_tensors import Pair
from tests.helpers.run_ranks import run_ranks


def attach_hooks(local: torch.Tensor, seen: list[Any], *, all_arguments: bool = False) -> None:
    """Attach hooks that send int8 values with one scale per rank's piece, and append their arguments to ``seen``."""

    def encode(mesh: DeviceMesh, pieces: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], object]:
        seen.append((mesh, pieces.clone()))
        scales = pieces.flatten(1).abs().amax(dim=1).clamp_min(1e-12) / 127
        shape = (-1, *(1 for _ in pieces.shape[1:]))
        return ((pieces / scales.view(shape)).round().to(torch.int8), scales), "note"

    def one(mesh: DeviceMesh, pieces: torch.Tensor) -> Any:
        return encode(mesh, pieces)

    def all_of_them(mesh: DeviceMesh, pieces: torch.Tensor, module: nn.Module, policy: MixedPrecisionPolicy) -> Any:
        seen.append((module, policy))
        return encode(mesh, pieces)

    def decode(outputs: tuple[torch.Tensor, ...], metadata: object, dtype: torch.dtype) -> torch.Tensor:
        assert metadata == "note"
        values, scales = outputs
        assert values.size(0) == scales.size(0)
        return (values.to(dtype) * scales.view(-1, *(1 for _ in values.shape[1:]))).sum(0)

    hooks: Any = local
    hooks.fsdp_pre_reduce_scatter = all_of_them if all_arguments else one
    hooks.fsdp_post_reduce_scatter = decode


def build(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5))


def batch_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(31 * step + rank))


def compare(width: int, dim: int, replicate: int, all_arguments: bool, codec: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicate, world_size // replicate))
    reference = build(width)
    model: Any = copy.deepcopy(reference)
    policy = CommunicationPolicy(reduce_scatter=Int8(), min_numel=1) if codec else None
    fully_shard(model, mesh=mesh, comm_policy=policy, shard_placement_fn=lambda p: Shard(dim if p.ndim == 2 else 0))
    seen: list[Any] = []
    attach_hooks(model[0].weight._local_tensor, seen, all_arguments=all_arguments)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        for r in range(world_size):
            (reference(batch_of(r, step)).square().mean() / world_size).backward()
        for k, (parameter, expected) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
            exact: Any = expected.grad
            error = (parameter.grad.full_tensor() - exact).norm() / exact.norm()
            if k == 0:
                assert 0 < error < 0.02
            else:
                assert error < (0.02 if codec else 1e-6)
    num_shards = world_size // replicate
    (given, pieces) = next(entry for entry in seen if isinstance(entry[0], DeviceMesh))
    assert given.ndim == 1
    assert given.size() == num_shards
    padded = list(reference[0].weight.shape)  # type: ignore[index]
    padded[dim] = -(-padded[dim] // num_shards)
    assert list(pieces.shape) == [num_shards, *padded]
    if all_arguments:
        assert seen[0] == (model[0], MixedPrecisionPolicy())


@pytest.mark.behaviour("E-09")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_hooks_choose_the_communicated_gradient_with_even_and_uneven_rows(world_size: int) -> None:
    run_ranks(compare, world_size, 8, 0, 1, False, False)
    run_ranks(compare, world_size, 7, 0, 1, True, False)
    run_ranks(compare, world_size, 7, 1, 1, False, False)


@pytest.mark.behaviour("E-09")
def test_hooks_compose_with_hybrid_meshes_and_codecs() -> None:
    run_ranks(compare, 4, 7, 0, 2, False, False)
    run_ranks(compare, 2, 8, 0, 2, False, False)  # one shard rank, two replicas
    run_ranks(compare, 2, 8, 0, 1, False, True)


def count_launches() -> None:
    """Check that gradients of hooks, encoded gradients and plain gradients share one collective."""
    model: Any = build(8)
    policy = CommunicationPolicy(reduce_scatter=Int4(), min_numel=40)
    fully_shard(model, comm_policy=lambda p: policy if p.shape == (5, 8) else None)
    attach_hooks(model[0].weight._local_tensor, [])
    launched: list[str] = []
    communicator: Any = state_of(model).group.process_groups[0].scatter
    original = communicator.launch

    def spy(kind: Collective, *args: Any) -> Any:
        if kind not in (Collective.ALL_GATHER, Collective.BARRIER):
            launched.append(kind.value)
        return original(kind, *args)

    communicator.launch = spy
    model(batch_of(dist.get_rank())).square().mean().backward()
    assert launched == ["all_to_all"]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.behaviour("E-09", "E-07")
def test_a_group_sends_all_its_gradients_in_one_message() -> None:
    run_ranks(count_launches, 2)


class QuietPair(Pair):
    """A wrapper subclass with hooks for both directions."""

    def fsdp_pre_reduce_scatter(self, mesh: DeviceMesh, pieces: torch.Tensor) -> Any:
        return (pieces.bfloat16(),), None

    def fsdp_post_reduce_scatter(self, outputs: Any, metadata: object, dtype: torch.dtype) -> torch.Tensor:
        total: torch.Tensor = outputs[0].to(dtype).sum(0)
        return total


def encode_both_directions() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = nn.Linear(6, 7, bias=False)
    model: Any = nn.Linear(6, 7, bias=False)
    model.weight = nn.Parameter(QuietPair(plain.weight.detach() / 2, plain.weight.detach() / 2))
    fully_shard(model)
    assert type(model.weight.to_local()) is QuietPair
    model(batch_of(rank)).square().mean().backward()
    for r in range(world_size):
        (plain(batch_of(r)).square().mean() / world_size).backward()
    found, expected = model.weight.grad.full_tensor(), plain.weight.grad
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


@pytest.mark.behaviour("E-09", "E-05")
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_subclass_brings_hooks_for_both_directions(world_size: int) -> None:
    run_ranks(encode_both_directions, world_size)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.maybe = (nn.Parameter(torch.randn(6, 5)) for _ in range(2))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = x @ self.always
        return y + x @ self.maybe if use else y


def skip() -> None:
    rank = dist.get_rank()
    model: Any = fully_shard(Sometimes())
    for parameter in (model.always, model.maybe):
        attach_hooks(parameter._local_tensor, [])
    model(batch_of(rank), False).square().mean().backward()
    gradients: list[Any] = [model.maybe.grad]
    model(batch_of(rank), rank == 0).square().mean().backward()
    gradients.append(model.maybe.grad)
    assert gradients[0] is None
    assert gradients[1].full_tensor().abs().sum() > 0


@pytest.mark.behaviour("E-09", "C-17")
def test_unused_parameters_with_hooks_keep_no_gradient() -> None:
    run_ranks(skip, 2)


def fail(change: Callable[[Any], None], message: str) -> None:
    """Break the hooks of a tensor by ``change`` and check that every rank raises an error."""
    model: Any = fully_shard(nn.Linear(6, 8, bias=False))
    local = model.weight._local_tensor
    attach_hooks(local, [])
    change(local)
    with pytest.raises(ParameterError, match=message):
        model(batch_of(dist.get_rank())).square().mean().backward()
    dist.barrier()


def remove_post_hook(local: Any) -> None:
    del local.fsdp_post_reduce_scatter


def take_three_arguments(local: Any) -> None:
    local.fsdp_pre_reduce_scatter = lambda mesh, pieces, more: None


def return_no_tuple(local: Any) -> None:
    local.fsdp_pre_reduce_scatter = lambda mesh, pieces: pieces


def return_flat_pieces(local: Any) -> None:
    local.fsdp_pre_reduce_scatter = lambda mesh, pieces: ((pieces.flatten(),), None)


def return_wrong_sum(local: Any) -> None:
    local.fsdp_post_reduce_scatter = lambda outputs, metadata, dtype: outputs[0]


def send_other_size_on_one_rank(local: Any) -> None:
    narrow = dist.get_rank() == 1
    local.fsdp_pre_reduce_scatter = lambda mesh, pieces: ((pieces.bfloat16() if narrow else pieces,), None)


@pytest.mark.behaviour("E-09")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            remove_post_hook,
            r"of parameter 'weight' \(Tensor\) defines fsdp_pre_reduce_scatter but not fsdp_post_reduce_sca",
        ),
        (
            take_three_arguments,
            r"takes 3 arguments beside self; expected fsdp_pre_reduce_scatter\(self, mesh, pieces\) or fs",
        ),
        (
            return_no_tuple,
            r"of parameter 'weight' must return \(tuple of tensors, metadata\), each tensor with 2 on dim 0",
        ),
        (
            return_flat_pieces,
            r"must return \(tuple of tensors, metadata\), each tensor with 2 on dim 0, one for each rank",
        ),
        (return_wrong_sum, r"must return the sum of the pieces, a tensor of shape \(4, 6\), not \(2, 4, 6\)"),
        (
            send_other_size_on_one_rank,
            r"of parameter 'weight' returned other shapes or dtypes on some ranks than on othe",
        ),
    ],
)
def test_hooks_that_cannot_work_are_refused_on_every_rank(change: Callable[[Any], None], message: str) -> None:
    run_ranks(fail, 2, change, message)


def change_later() -> None:
    model: Any = fully_shard(nn.Linear(6, 8, bias=False))
    local = model.weight._local_tensor
    attach_hooks(local, [])
    model(batch_of(0)).square().mean().backward()
    local.fsdp_pre_reduce_scatter = lambda mesh, pieces: ((pieces,), None)
    with pytest.raises(
        ParameterError, match=r"returned payloads of \[\(\(2, 4, 6\), torch.float32\)\], after \[\(\(2, "
    ):
        model(batch_of(0)).square().mean().backward()


@pytest.mark.behaviour("E-09")
def test_payloads_must_stay_the_same_from_step_to_step() -> None:
    run_ranks(change_later, 2)
