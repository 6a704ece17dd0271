"""What the tests of sharding share: where each shard must lie, and a reference trained beside the sharded model.

Nothing here asks the library where anything lies, so a wrong layout cannot agree with itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close

from composable_fsdp import FSDPModule
from tests._internals import Bucket, state_of
from tests.helpers.models import Task

__all__ = [
    "adamw",
    "assert_sharded",
    "buckets_of",
    "exactly",
    "expected_shard",
    "initialise",
    "local",
    "sharded",
    "single_rank",
    "train_alike",
    "values_of",
    "whole",
]


@contextmanager
def single_rank() -> Iterator[None]:
    """This process as the only rank of a gloo group: for what needs no peers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(module: nn.Module) -> FSDPModule:
    """``module``, known to the type checker for what it is now."""
    assert isinstance(module, FSDPModule)
    return module


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value, as a copy. Collective for DTensors."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name, every name of a shared one included. Collective for sharded modules."""
    return {name: whole(p) for name, p in module.named_parameters(remove_duplicate=False)}


def expected_shard(value: torch.Tensor, rank: int, num_ranks: int, dim: int = 0) -> torch.Tensor:
    """What ``rank`` must hold of ``value``: as ``torch.chunk`` cuts it, the last ranks getting less or nothing."""
    chunks = value.chunk(num_ranks, dim) if value.size(dim) else ()
    return chunks[rank] if rank < len(chunks) else value.narrow(dim, 0, 0)


def assert_sharded(
    module: nn.Module, values: Mapping[str, torch.Tensor], mesh: DeviceMesh, dims: Mapping[str, int] | None = None
) -> None:
    """Every parameter is a DTensor parameter on ``mesh``, cut on its dim (0 unless said) over the last mesh dim.

    Args:
        module: what was sharded.
        values: its parameters before, in their order.
        mesh: 1-d, or 2-d with the replicas on the first dim.
        dims: parameters that are cut on another dim, counted from the front.
    """
    fulls = values_of(module)
    assert list(fulls) == list(values)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for name, parameter in module.named_parameters(remove_duplicate=False):
        dim, value = (dims or {}).get(name, 0), values[name]
        assert isinstance(parameter, nn.Parameter), name
        assert isinstance(parameter, DTensor), name
        assert parameter.device_mesh == mesh, name
        assert parameter.placements == (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(dim)), name
        assert (parameter.shape, parameter.dtype) == (value.shape, value.dtype), name
        assert parameter.is_leaf, name
        exactly(parameter.to_local().detach(), expected_shard(value, coordinate[-1], mesh.size(-1), dim), name)
        exactly(fulls[name], value, name)


def exactly(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """The same values, shape and dtype, bit for bit."""
    assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")


def initialise(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copies this rank's part of each full value into the sharded parameter of that name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            (dim,) = (p.dim for p in parameter.placements if isinstance(p, Shard))
            mesh = parameter.device_mesh
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            parameter.to_local().copy_(expected_shard(values[name], coordinate[-1], mesh.size(-1), dim))


def adamw(parameters: Iterable[nn.Parameter], eps: float = 1e-5) -> torch.optim.Optimizer:
    """With an ``eps`` that keeps it from blowing rounding of near-zero gradients up to whole steps."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=eps)


def train_alike(
    model: nn.Module,
    reference: nn.Module,
    task: Task,
    *,
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Trains ``model`` on this rank's batches, ``reference`` on the gradient averaged over all ranks' batches.

    Losses and gradients must agree at every step, parameters at the end; within the defaults of the dtype unless said.
    """

    def alike(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
        assert (actual is None) == (expected is None), what
        if actual is not None and expected is not None:
            assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")

    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    make = functools.partial(adamw, eps=task.eps) if optimizer is None else optimizer
    ours, theirs = make(model.parameters()), make(reference.parameters())
    for step in range(steps):
        loss = task.loss(model, task.batch_of(step, rank))
        loss.backward()
        losses = [task.loss(reference, task.batch_of(step, r)) for r in range(num_ranks)]
        torch.stack(losses).mean().backward()
        gradients = {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
        alike(loss, losses[rank], f"loss of step {step}")
        for name, parameter in reference.named_parameters():
            alike(gradients[name], parameter.grad, f"gradient of {name} in step {step}")
        ours.step()
        ours.zero_grad()
        theirs.step()
        theirs.zero_grad()
    for (name, value), expected in zip(values_of(model).items(), values_of(reference).values(), strict=True):
        alike(value, expected, f"{name} at the end")


def buckets_of(model: nn.Module) -> list[Bucket]:
    buckets = [
        b for module in model.modules() if isinstance(module, FSDPModule) for b in state_of(module).group.buckets
    ]
    return [bucket for bucket in buckets if isinstance(bucket, Bucket)]


def local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
