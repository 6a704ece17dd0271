"""Computes expected shards, and trains a reference in parallel with the sharded model. These helpers do not use the
library's layouts, so that tests detect a wrong layout."""

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
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import FSDPModule
from tests._internals import Bucket, InPlaceBucket, mesh, state_of
from tests.helpers.mesh_caches import forget_meshes
from tests.helpers.models import Task


@contextmanager
def single_rank() -> Iterator[None]:
    """Initialize a gloo group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        mesh.known_meshes()  # drops those of the group; they and the caches keep its threads, which wake all the time
        forget_meshes()


@contextmanager
def fake_ranks(size: int, rank: int = 0) -> Iterator[None]:
    """Initialize a group of ``size`` ranks whose collectives send nothing, of which only this process exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full value. Collective for DTensors."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters by name. A shared parameter has several names. Collective for sharded modules."""
    return {name: full_value(p) for name, p in module.named_parameters(remove_duplicate=False)}


def expected_shard(value: torch.Tensor, rank: int, num_ranks: int, dim: int = 0) -> torch.Tensor:
    """Return ``rank``'s shard of ``value`` according to ``torch.chunk``. The last shards may be smaller or empty."""
    chunks = value.chunk(num_ranks, dim) if value.size(dim) else ()
    return chunks[rank] if rank < len(chunks) else value.narrow(dim, 0, 0)


def assert_sharded(
    module: nn.Module, values: Mapping[str, torch.Tensor], mesh: DeviceMesh, dims: Mapping[str, int] | None = None
) -> None:
    """Check that every parameter is a DTensor, sharded on its dim (default 0) over the last dim of ``mesh``.
    ``module``: the sharded module. ``values``: the parameters before sharding, in order. ``mesh``: a 1-d mesh, or a 2-d
    mesh whose first dim replicates. ``dims``: the non-negative dims of parameters that are not sharded on dim 0."""
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
        assert_exact(parameter.to_local().detach(), expected_shard(value, coordinate[-1], mesh.size(-1), dim), name)
        assert_exact(fulls[name], value, name)


def assert_exact(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Check that values are bitwise equal, and that shapes and dtypes are equal."""
    assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")


def initialise(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's shard of each full value into the parameter with the same name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            (dim,) = (p.dim for p in parameter.placements if isinstance(p, Shard))
            mesh = parameter.device_mesh
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            parameter.to_local().copy_(expected_shard(values[name], coordinate[-1], mesh.size(-1), dim))


def adamw(parameters: Iterable[nn.Parameter], eps: float = 1e-5) -> torch.optim.Optimizer:
    """Return AdamW with an ``eps`` that does not amplify the rounding of near-zero gradients."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=eps)


def train_and_compare(
    model: nn.Module,
    reference: nn.Module,
    task: Task,
    *,
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Train ``model`` on this rank's batches, and ``reference`` on the average gradient of all ranks' batches. Losses
    and gradients must be equal at every step, and parameters at the end. The default tolerance is the dtype's."""

    def assert_close_or_none(actual: torch.Tensor | None, expected: torch.Tensor | None, label: str) -> None:
        assert (actual is None) == (expected is None), label
        if actual is not None and expected is not None:
            assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{label}: {text}")

    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    make_optimizer = functools.partial(adamw, eps=task.eps) if optimizer is None else optimizer
    ours, theirs = (make_optimizer(model.parameters()), make_optimizer(reference.parameters()))
    for step in range(steps):
        loss = task.loss(model, task.batch_of(step, rank))
        loss.backward()
        losses = [task.loss(reference, task.batch_of(step, r)) for r in range(num_ranks)]
        torch.stack(losses).mean().backward()
        gradients = {n: None if p.grad is None else full_value(p.grad) for n, p in model.named_parameters()}
        assert_close_or_none(loss, losses[rank], f"loss of step {step}")
        for name, parameter in reference.named_parameters():
            assert_close_or_none(gradients[name], parameter.grad, f"gradient of {name} in step {step}")
        ours.step()
        ours.zero_grad()
        theirs.step()
        theirs.zero_grad()
    for (name, value), expected in zip(values_of(model).items(), values_of(reference).values(), strict=True):
        assert_close_or_none(value, expected, f"{name} at the end")


def buckets_of(model: nn.Module) -> list[Bucket | InPlaceBucket]:
    buckets = [
        b for module in model.modules() if isinstance(module, FSDPModule) for b in state_of(module).group.buckets
    ]
    return [bucket for bucket in buckets if isinstance(bucket, (Bucket, InPlaceBucket))]


def local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
