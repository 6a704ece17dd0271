"""``dp_mesh_dims``: parameters that are DTensors on one mesh of all axes, some of which are data-parallel.

The model is a plain one placed on the whole mesh, and fed DTensors: no tensor-parallel styles, so gradients arrive as
DTensor leaves them, ``Partial`` on data-parallel dims or ``Replicate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from composable_fsdp import DataParallelMeshDims, fully_shard
from composable_fsdp.runtime.parameter import local_part
from composable_fsdp.sharding import ModelParallel
from composable_fsdp.testing import run_ranks
from tests.parity.training import Play
from tests.ranks._model_parallel import Pairs, assert_trains_alike, cut_pairs, named_mesh, play
from tests.ranks._models import Task, seeded, shard_layers, squared_error, vectors
from tests.ranks._sharding import exactly, values_of

Dims = DataParallelMeshDims
PAIR = Task(seeded(Pairs, hidden=(7,)), vectors(5, 3), squared_error)


def place_pair(model: nn.Module, mesh: DeviceMesh) -> None:
    """On the whole mesh: cut on ``tp``, if there is such a dim, as in tensor parallelism; replicated on all others."""
    cuts = cut_pairs(model)

    def place(path: str, module: nn.Module, _: object) -> None:
        for attribute, parameter in list(module._parameters.items()):
            name = f"{path}.{attribute}" if path else attribute
            placed: list[Placement] = [Replicate()] * mesh.ndim
            for axis, dim in cuts[name]:
                if axis in (mesh.mesh_dim_names or ()):
                    placed[(mesh.mesh_dim_names or ()).index(axis)] = Shard(dim)
            assert parameter is not None
            whole = distribute_tensor(parameter.detach(), mesh, placed)
            module.register_parameter(attribute, nn.Parameter(whole))

    distribute_module(model, mesh, place)


def play_on(mesh: DeviceMesh, data: Sequence[str]) -> Play:
    """Batches are cut over the data-parallel dims, losses are those of this rank's part."""
    placed = [Shard(0) if name in data else Replicate() for name in mesh.mesh_dim_names or ()]

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        inputs, target = PAIR.batch_of(step, rank)
        output = model(DTensor.from_local(inputs, mesh, placed))
        loss = PAIR.criterion(output.redistribute(placements=placed).to_local(), target)
        loss.backward()
        return loss.detach()

    return run


def data_rank(mesh: DeviceMesh, data: Sequence[str]) -> int:
    """Which of the data-parallel ranks this is. Any numbering will do."""
    rank = 0
    for name in data:
        rank = rank * mesh[name].size() + mesh.get_local_rank(name)
    return rank


def check(mesh: DeviceMesh, dims: object, data: Sequence[str], **options: object) -> nn.Module:
    """Places ``PAIR`` on ``mesh``, shards and trains it. ``data`` are the names in ``dims``."""
    model, reference = PAIR.build(), PAIR.build()
    place_pair(model, mesh)
    shard_layers(model, fully_shard, mesh=mesh, dp_mesh_dims=dims, **options)
    for name, value in values_of(model).items():
        exactly(value, values_of(reference)[name], name)
    size = prod(mesh[name].size() for name in data)
    run = play_on(mesh, data)
    what = f"{mesh}, {dims}"
    assert_trains_alike(model, reference, data_rank(mesh, data), size, run, reference_run=play(PAIR), what=what)
    return model


def placed(model: nn.Module, name: str) -> tuple[tuple[str, ...], tuple[Placement, ...]]:
    """Names of the mesh dims on which a parameter is, and how."""
    parameter = model.get_parameter(name)
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh.mesh_dim_names or (), parameter.placements


UP, DOWN, HEAD = "layers.0.up.weight", "layers.0.down.weight", "head.weight"
STRIDED = _StridedShard(0, split_factor=2)


def beside_tensor_parallelism() -> None:
    mesh = named_mesh(dp=2, tp=2)  # to the right, and torch's own class
    for dims in (Dims(shard="dp"), peer.DataParallelMeshDims(shard="dp")):
        model = check(mesh, dims, ["dp"])
        assert placed(model, UP) == (("dp", "tp"), (STRIDED, Shard(0)))
        assert placed(model, DOWN) == (("dp", "tp"), (Shard(0), Shard(1)))
        assert placed(model, HEAD) == (("dp", "tp"), (Shard(0), Replicate()))
    model = check(mesh, Dims(replicate="dp"), ["dp"])
    assert placed(model, UP) == (("dp", "tp"), (Replicate(), Shard(0)))

    mesh = named_mesh(tp=2, dp=2)  # to the left: what cut first comes first, so nothing is strided
    model = check(mesh, Dims(shard=("dp",)), ["dp"])
    assert placed(model, UP) == (("tp", "dp"), (Shard(0), Shard(0)))
    assert placed(model, DOWN) == (("tp", "dp"), (Shard(1), Shard(0)))


@pytest.mark.behaviour("A-06", "A-07", "C-02", "C-03", "C-16")
def test_tensor_parallel_dims_on_either_side_of_the_data_parallel_one() -> None:
    run_ranks(beside_tensor_parallelism, 4)


def over_several_dims() -> None:
    mesh, both = named_mesh(a=2, b=2), ["a", "b"]
    model = check(mesh, Dims(shard=("a", "b")), both)
    names, placements = placed(model, HEAD)
    assert (len(names), placements) == (1, (Shard(0),))
    assert local_part(model.get_parameter(HEAD)).size(0) == (1 if dist.get_rank() < 3 else 0)
    model = check(mesh, Dims(replicate=("a", "b")), both)
    assert placed(model, HEAD)[1] == (Replicate(),)
    model = check(mesh, Dims(replicate="a", shard="b"), both)
    assert placed(model, HEAD) == (("a", "b"), (Replicate(), Shard(0)))
    model = check(mesh, Dims(replicate="b", shard="a"), both)
    assert placed(model, HEAD) == (("a", "b"), (Shard(0), Replicate()))


@pytest.mark.behaviour("A-06", "A-07", "C-02", "C-16")
def test_several_data_parallel_dims_count_as_one_or_make_a_hybrid_mesh() -> None:
    run_ranks(over_several_dims, 4)


def over_several_dims_beside_tensor_parallelism() -> None:
    mesh = named_mesh(a=2, b=1, tp=2)
    model = check(mesh, Dims(replicate="a", shard="b"), ["a", "b"])
    assert placed(model, UP) == (("a", "b", "tp"), (Replicate(), STRIDED, Shard(0)))
    model = check(mesh, Dims(shard=("a", "b")), ["a", "b"])
    assert placed(model, UP)[1] == (STRIDED, Shard(0))
    model = check(mesh, Dims(replicate=("a", "b")), ["a", "b"])
    assert placed(model, UP)[1] == (Replicate(), Shard(0))

    mesh = named_mesh(a=2, tp=2, b=1)  # tensor parallelism in between
    model = check(mesh, Dims(replicate="b", shard="a"), ["a", "b"])
    assert placed(model, UP) == (("a", "tp", "b"), (STRIDED, Shard(0), Replicate()))
    model = check(mesh, Dims(replicate="a", shard="b"), ["a", "b"])
    assert placed(model, UP) == (("a", "tp", "b"), (Replicate(), Shard(0), Shard(0)))
    model = check(mesh, Dims(shard=("a", "b")), ["a", "b"])
    assert placed(model, UP)[1] == (STRIDED, Shard(0))

    mesh = named_mesh(tp=2, a=1, b=2)
    model = check(mesh, Dims(shard=("a", "b")), ["a", "b"])
    assert placed(model, UP)[1] == (Shard(0), Shard(0))


@pytest.mark.behaviour("A-06", "A-07", "C-02")
def test_several_data_parallel_dims_beside_between_and_around_tensor_parallel_ones() -> None:
    run_ranks(over_several_dims_beside_tensor_parallelism, 4)


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(-1)


def other_dims_and_smaller_meshes() -> None:
    mesh = named_mesh(dp=2, tp=2)
    model = check(mesh, Dims(shard="dp"), ["dp"], shard_placement_fn=last_dim)
    assert placed(model, DOWN) == (("dp", "tp"), (_StridedShard(1, split_factor=2), Shard(1)))
    assert placed(model, UP) == (("dp", "tp"), (Shard(1), Shard(0)))
    mesh = named_mesh(dp=4)
    check(mesh, Dims(shard="dp"), ["dp"], reshard_after_forward=2)
    check(mesh, Dims(shard="dp"), ["dp"], reshard_after_forward=2, shard_placement_fn=last_dim)


@pytest.mark.behaviour("A-05", "A-06", "C-01")
def test_other_dims_are_cut_and_parameters_gathered_from_fewer_ranks_in_backward() -> None:
    run_ranks(other_dims_and_smaller_meshes, 4)


class Mixed(nn.Module):
    """Of its gradients one arrives partial on the data-parallel dim and one replicated, as the loss has it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.ones(5))
        self.unseen = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum over data-parallel ranks of what sees the data, and as many times what does not."""
        out: torch.Tensor = (self.seen * x).sum() + self.unseen.square().sum()
        return out


def one_scale() -> None:
    """A loss over all ranks' data: its gradient is one, however it arrives, and divided by the number of ranks."""
    mesh = named_mesh(dp=2)
    arrived: dict[str, tuple[Placement, ...]] = {}
    model, reference = Mixed(), Mixed()
    for name, parameter in list(model.named_parameters()):
        whole = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
        model.register_parameter(name, whole)
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))

    def note(name: str, gradient: torch.Tensor) -> None:
        assert isinstance(gradient, DTensor)
        arrived[name] = gradient.placements

    def watch(module: nn.Module, _: object) -> None:
        for name, parameter in module.named_parameters():
            parameter.register_hook(partial(note, name))

    model.register_forward_pre_hook(watch)
    x = torch.arange(20.0).view(4, 5)
    model(distribute_tensor(x, mesh, [Shard(0)])).full_tensor().backward()
    assert arrived == {"seen": (Partial(),), "unseen": (Replicate(),)}
    reference(x).backward()
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        assert parameter.grad is not None
        exactly(gradient.full_tensor(), parameter.grad / 2, name)

    local = torch.randn(5)  # what is partial needs no communication before it is reduced
    inner = ModelParallel(mesh, (Replicate(),), (5,), frozenset({0}))
    assert inner.local_gradient(DTensor.from_local(local, mesh, [Partial()])).data_ptr() == local.data_ptr()


@pytest.mark.behaviour("C-16")
def test_partial_and_replicated_gradients_have_one_scale() -> None:
    run_ranks(one_scale, 2)
