"""Models that are parallelized over a tensor-parallel mesh before they are sharded, and the expected results. The
expected shards are computed with ``torch.chunk``, tensor parallelism first. They do not depend on the placements of
DTensor or the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from composable_fsdp import fully_shard
from tests.helpers.models import Task, cross_entropy, seeded, sequences, squared_error, vectors
from tests.helpers.sharding import assert_exact, expected_shard, full_value, values_of
from tests.helpers.training import OPTIMIZERS, OptimizerFactory, Play, Run, assert_equal_runs, train

Cut = tuple[str, int]
"""A mesh dim, and the tensor dim that is sharded over it."""


class Pair(nn.Module):
    """Two linear layers: tensor parallelism shards the rows of the first and the columns of the second."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + out


class Pairs(nn.Module):
    """Pairs with the odd sizes 7, 5, 3 and 1. The head and ``scale`` are not tensor-parallel."""

    def __init__(self, width: int = 5, hidden: Sequence[int] = (7, 1)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair(width, n) for n in hidden])
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale


PAIRS = Task(seeded(Pairs), vectors(5, 3), squared_error)


def parallelize_pairs(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parallelize column-wise, then row-wise. The intermediate tensor stays a DTensor because it is uneven."""
    for layer in model.get_submodule("layers").children():
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def sharded_pairs(mesh: DeviceMesh) -> nn.Module:
    """Return a new :class:`Pairs`, parallelized over the dim ``tp`` of ``mesh``, and sharded over ``dp`` by layers."""
    model = PAIRS.build()
    parallelize_pairs(model, mesh["tp"])
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def cut_pairs(model: nn.Module) -> dict[str, list[Cut]]:
    """Return how :func:`parallelize_pairs` shards each parameter of :class:`Pairs` over the mesh dim ``tp``."""
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    return {
        name: [("tp", dim) for suffix, dim in dims.items() if name.endswith(suffix)]
        for name, _ in model.named_parameters()
    }


class Layer(nn.Module):
    """A norm, then a pair. With sequence parallelism the norm gets part of the tokens, so its gradient is partial."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Pair(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        out: torch.Tensor = self.mlp.down(torch.tanh(self.mlp.up(normed)))
        return x + out


class Decoder(nn.Module):
    """A model with embedding, layers, norm and head, for tensor and sequence parallelism as in torch's tutorial."""

    def __init__(self, vocabulary: int = 23, width: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width, 10) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


DECODER = Task(seeded(Decoder), sequences(23), cross_entropy)


def parallelize_decoder(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism inside the layers and sequence parallelism between them."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.get_submodule("layers").children():
        parallelize_module(
            layer,
            mesh,
            {
                "norm": SequenceParallel(),
                "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def named_mesh(**sizes: int) -> DeviceMesh:
    """Return a mesh over all ranks with dims of these names and sizes."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def play(task: Task) -> Play:
    """Run one forward and one backward on the batch of a data-parallel rank."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = task.loss(model, task.batch_of(step, rank))
        loss.backward()
        return loss.detach()

    return run


def full_run(run: Run) -> Run:
    """Return ``run`` with full tensors. Collective."""
    gradients = {name: None if g is None else full_value(g) for name, g in run.gradients.items()}
    return Run(run.losses, {name: full_value(p) for name, p in run.parameters.items()}, gradients)


def assert_cut(
    module: nn.Module, values: Mapping[str, torch.Tensor], mesh: DeviceMesh, cuts: Mapping[str, Sequence[Cut]]
) -> None:
    """Check that this rank's shard of each value is the result of applying ``cuts`` over dims of ``mesh`` in order."""
    parameters = dict(module.named_parameters())
    assert list(parameters) == list(values)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), name
        assert parameter.shape == values[name].shape, name
        shard = values[name]
        for axis, dim in cuts[name]:
            shard = expected_shard(shard, mesh.get_local_rank(axis), mesh[axis].size(), dim)
        assert_exact(parameter.to_local().detach(), shard, name)
    for name, value in values_of(module).items():
        assert_exact(value, values[name], f"full {name}")


def assert_trains_like(
    model: nn.Module,
    reference: nn.Module,
    rank: int,
    size: int,
    run: Play,
    make_optimizer: OptimizerFactory = OPTIMIZERS["sgd"],
    *,
    reference_run: Play | None = None,
    what: str = "",
    **options: Any,
) -> Run:
    """Check that ``model``, trained as rank ``rank`` of ``size``, equals ``reference``, trained on all ranks' data."""
    ours = train(model, run, make_optimizer, ranks=[rank], watched=rank, **options)
    expected = train(
        reference, reference_run or run, make_optimizer, ranks=range(size), watched=rank, divide=size, **options
    )
    for name, parameter in model.named_parameters():
        gradient = ours.gradients[name]
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            assert gradient.device_mesh == parameter.device_mesh, name
            assert gradient.placements == parameter.placements, name
            assert gradient.to_local().shape == parameter.to_local().shape, name
    result = full_run(ours)
    assert_equal_runs(result, expected, what=what)
    return result
