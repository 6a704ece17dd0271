"""A model with every kind of state that a checkpoint must keep, the worlds that save and load it, and expected values.
Values depend only on names, so every world can compute the values of any other world."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer

from composable_fsdp import CPUOffloadPolicy, fully_shard
from composable_fsdp.errors import CheckpointError
from tests._internals import checkpoint_save, extent_of, gather, like, shardings_of, states_below
from tests.helpers.model_parallel import Pair, named_mesh, parallelize_pairs
from tests.helpers.models import Task


@contextmanager
def all_ranks_raise(text: str | None = None) -> Iterator[Any]:
    with pytest.raises(CheckpointError, match=text) as caught:
        yield caught
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard."""
    shard: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard.detach()


class Counter(nn.Module):
    """A module whose extra state is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Everything(nn.Module):
    """Has uneven sizes, a shared weight, parameters with empty shards, buffers, a scalar and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([Pair(5, 7), Pair(5, 1)])
        self.counter = Counter()
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.narrow = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def plain() -> Everything:
    return Everything()


def flat(ranks: int, **options: Any) -> Callable[[], Everything]:
    def build() -> Everything:
        return _sharded(Everything(), mesh=init_device_mesh("cpu", (ranks,)), **options)

    return build


def hybrid() -> Everything:
    return _sharded(Everything(), mesh=named_mesh(replicate=2, shard=2))


def tensor_parallel() -> Everything:
    mesh, model = named_mesh(dp=2, tp=2), Everything()
    parallelize_pairs(model, mesh["tp"])
    return _sharded(model, mesh=mesh["dp"])


def _sharded(model: Everything, **options: Any) -> Everything:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, ignored_params={model.temperature}, **options)
    return model


WORLDS: dict[str, tuple[int, Callable[[], Everything]]] = {
    "1": (1, flat(1)),
    "2, on dim 1": (2, flat(2, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)),
    "3": (3, flat(3)),
    "4, in host memory": (4, flat(4, offload_policy=CPUOffloadPolicy())),
    "2x2 hybrid": (4, hybrid),
    "2x2 tensor-parallel": (4, tensor_parallel),
}
"""The number of ranks of each world, and the function that builds the model on them."""


def adamw(model: nn.Module) -> AdamW:
    """Return AdamW with two parameter groups with different settings."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    known = set(map(id, biases))
    weights = [p for p in model.parameters() if id(p) not in known]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.25}]
    return AdamW(groups, lr=0.5)


def expected_value(name: str, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(tuple(like.shape), generator=generator).mul(100).to(like.dtype)


def tensors(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Return all tensors whose values are checked, each with the sharding of its parameter."""
    shardings = shardings_of(states_below(model))
    for name, parameter in model.named_parameters():
        yield name, parameter, shardings.get(id(parameter))
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in state.items():
            yield f"{name}.{key}", value, shardings.get(id(parameter))
    for name in ("mean", "nothing", "seen"):
        yield name, model.get_buffer(name), None


@torch.no_grad()
def fill(model: Everything, optimizer: Optimizer | None = None) -> None:
    """Set all state to the expected values. ``temperature`` has no optimizer state, like an unused parameter."""
    for parameter in model.parameters() if optimizer is not None else ():
        if parameter is not model.temperature:
            assert optimizer is not None
            moments = {key: _zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    for name, tensor, sharding in tensors(model, optimizer):
        local(tensor).copy_(extent_of(tensor, sharding).take(expected_value(name, tensor)))
    model.counter.calls = 42


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)
    return like(parameter, torch.zeros_like(local(parameter)))


@torch.no_grad()
def zeroed(model: Everything) -> Everything:
    for _, tensor, _ in tensors(model):
        local(tensor).zero_()
    return model


@torch.no_grad()
def assert_holds(model: Everything, optimizer: Optimizer | None = None) -> None:
    """Check that all values equal those of :func:`fill` bitwise and states are placed like parameters. Collective."""
    for name, tensor, sharding in tensors(model, optimizer):
        found = gather(tensor, sharding)
        assert torch.equal(found, expected_value(name, tensor)), f"{name}\n{found}\n{expected_value(name, tensor)}"
    assert model.head.weight is model.embedding.weight
    assert model.counter.calls == 42
    for parameter in model.parameters() if optimizer is not None else ():
        assert optimizer is not None
        state = optimizer.state.get(parameter, {})
        assert sorted(state) == ([] if parameter is model.temperature else ["exp_avg", "exp_avg_sq", "step"])
        for key in ("exp_avg", "exp_avg_sq") if state else ():
            assert isinstance(state[key], DTensor) == isinstance(parameter, DTensor), key
            if isinstance(parameter, DTensor):
                assert state[key].placements == parameter.placements
                assert local(state[key]).shape == local(parameter).shape


class Gate:
    """Blocks writing until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        write_value = checkpoint_save.write_value

        def waits(file: Any, value: Any) -> None:
            assert self.opened.wait(30)
            write_value(file, value)

        monkeypatch.setattr(checkpoint_save, "write_value", waits)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, steps: range, ranks: int = 1) -> None:
    """Train on four batches, divided evenly between the data-parallel ranks."""
    own = range(dist.get_rank() * 4 // ranks, (dist.get_rank() + 1) * 4 // ranks)
    for step in steps:
        optimizer.zero_grad()
        loss = sum((task.loss(model, task.batch_of(step, shard)) for shard in own), torch.zeros(())) / len(own)
        loss.backward()
        optimizer.step()
