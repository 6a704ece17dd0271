"""A model of dense layers and experts, and its placement on two meshes."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from composable_fsdp import ShardPlacementResult, fully_shard
from tests.helpers.models import Task, seeded, shard_layers, squared_error, vectors

NUM_EXPERTS = 4


class Experts(nn.Module):
    """A chain of experts with 5 rows and columns. Each expert-parallel rank holds some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, 5, 5) / 2)
        self.gain = nn.Parameter(torch.ones(NUM_EXPERTS, 5))
        self.held = slice(0, NUM_EXPERTS)
        """Those that the reference uses; what is sharded has no others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, gain = (p.to_local() if isinstance(p, DTensor) else p[self.held] for p in (self.weight, self.gain))
        for expert, scale in zip(weight, gain, strict=True):
            x = torch.tanh(x @ expert) * scale
        return x


class Layer(nn.Module):
    """A dense layer and experts in one parameter group, with parameters on two meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 5)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.dense(x))


class MixtureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MIXTURE = Task(seeded(MixtureModel), vectors(5, 3), squared_error)


def place_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    placed = set()
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        for name, parameter in list(experts.named_parameters(recurse=False)):
            weight = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            experts.register_parameter(name, weight)
            placed.add(weight)
    return placed


def sharded_mixture(mesh: DeviceMesh, cut: Shard | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model with experts over ``ep``, cut over ``edp`` along ``cut``, and the rest over both dims."""
    model = MIXTURE.build().to(dtype)
    placed, apart = place_experts(model, mesh["ep"]), ShardPlacementResult(cut, mesh["edp"])
    data = mesh["edp", "ep"]._flatten("dp")
    return shard_layers(model, fully_shard, mesh=data, shard_placement_fn=lambda p: apart if p in placed else None)
