"""``dp_mesh_dims``: parameters that are DTensors on one mesh with data-parallel and other dims.

The model is a plain one placed on the whole mesh, and fed DTensors: no tensor-parallel styles, so gradients arrive as
DTensor leaves them, ``Partial`` on data-parallel dims or ``Replicate``. Optimizers are SGD: Adam hides a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard
from torch.testing import assert_close

from composable_fsdp import DataParallelMeshDims, fully_shard
from tests.helpers.model_parallel import Pairs, assert_trains_like, cut_pairs, named_mesh, play
from tests.helpers.models import Task, seeded, shard_layers, squared_error, vectors
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, values_of
from tests.helpers.training import Play

Dims = DataParallelMeshDims
LIBRARIES: tuple[Callable[..., Any], Callable[..., Any]] = fully_shard, peer.fully_shard
"""Both take torch's ``DataParallelMeshDims``."""
PAIR = Task(seeded(Pairs, hidden=(7,)), vectors(5, 3), squared_error)
EVEN = Task(seeded(Pairs, hidden=(8,)), vectors(5, 3), squared_error)
"""torch's FSDP2 wants even sizes where a dim other than the first is cut twice."""


def place_pair(model: Any, mesh: DeviceMesh) -> None:
    """Place the model on the whole mesh: sharded on ``tp``, if there is such a dim, replicated on all others."""
    cuts = cut_pairs(model)

    def place(path: str, module: Any, _: object) -> None:
        for attribute, parameter in list(module._parameters.items()):
            name = f"{path}.{attribute}" if path else attribute
            placed: list[Placement] = [Replicate()] * mesh.ndim
            for axis, dim in cuts[name]:
                if axis in (mesh.mesh_dim_names or ()):
                    placed[(mesh.mesh_dim_names or ()).index(axis)] = Shard(dim)
            distributed = distribute_tensor(parameter.detach(), mesh, placed)
            module.register_parameter(attribute, nn.Parameter(distributed))

    distribute_module(model, mesh, place)


def play_on(mesh: DeviceMesh, data: Sequence[str], *, alternates: bool = True) -> Play:
    """Batches differ between data-parallel ranks, losses are those of this rank's part.

    In even steps the inputs are one batch, sharded over the data-parallel dims, so that gradients are partial there. In
    odd steps, if it ``alternates``, every rank declares its inputs replicated, as upstream's tests do, and gradients
    are replicated.
    """

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        cut = Replicate() if alternates and step % 2 else Shard(0)
        placed = [cut if name in data else Replicate() for name in mesh.mesh_dim_names or ()]
        inputs, target = PAIR.batch_of(step, rank)
        output = model(DTensor.from_local(inputs, mesh, placed, run_check=False))
        loss = PAIR.criterion(output.redistribute(placements=placed).to_local(), target)
        loss.backward()
        return loss.detach()

    return run


def data_rank(mesh: DeviceMesh, data: Sequence[str]) -> int:
    """Return the number of this data-parallel rank, in any numbering."""
    rank = 0
    for name in data:
        rank = rank * mesh[name].size() + mesh.get_local_rank(name)
    return rank


def check(mesh: DeviceMesh, dims: object, data: Sequence[str], **options: object) -> nn.Module:
    """Place ``PAIR`` on ``mesh``, shard and train it. ``data`` are the names in ``dims``."""
    model, reference = PAIR.build(), PAIR.build()
    place_pair(model, mesh)
    shard_layers(model, fully_shard, mesh=mesh, dp_mesh_dims=dims, **options)
    for name, value in values_of(model).items():
        assert_exact(value, values_of(reference)[name], name)
    size = prod(mesh[name].size() for name in data)
    run = play_on(mesh, data, alternates=mesh.ndim < 3)
    what = f"{mesh}, {dims}"
    assert_trains_like(model, reference, data_rank(mesh, data), size, run, reference_run=play(PAIR), what=what, steps=2)
    return model


def placed(model: Any, name: str) -> tuple[tuple[str, ...], tuple[Placement, ...]]:
    parameter = model.get_parameter(name)
    return parameter.device_mesh.mesh_dim_names or (), parameter.placements


SECONDS = 240.0
"""The timeout of tests on three dims, in which DTensor of torch 2.15 took more than a minute on a busy machine."""

UP, DOWN, HEAD = "layers.0.up.weight", "layers.0.down.weight", "head.weight"
STRIDED = _StridedShard(0, split_factor=2)


@pytest.mark.behaviour("A-06", "A-07", "C-02", "J-02")
@on_ranks(4, timeout=SECONDS)
def test_several_data_parallel_dims_beside_between_and_around_tensor_parallel_ones() -> None:
    mesh = named_mesh(a=2, b=1, tp=2)
    model = check(mesh, Dims(replicate="a", shard="b"), ["a", "b"])
    assert placed(model, UP) == (("a", "b", "tp"), (Replicate(), STRIDED, Shard(0)))
    model = check(mesh, Dims(shard=("a", "b")), ["a", "b"])
    assert placed(model, UP)[1] == (STRIDED, Shard(0))

    mesh = named_mesh(a=2, tp=2, b=1)  # tensor parallelism in between
    model = check(mesh, Dims(replicate="b", shard="a"), ["a", "b"])
    assert placed(model, UP) == (("a", "tp", "b"), (STRIDED, Shard(0), Replicate()))

    mesh = named_mesh(tp=2, a=1, b=2)
    model = check(mesh, Dims(shard=("a", "b")), ["a", "b"])
    assert placed(model, UP)[1] == (Shard(0), Shard(0))


PEER_MESHES: list[tuple[dict[str, int], dict[str, object]]] = [
    ({"dp": 2, "tp": 2}, {"shard": "dp"}),
    ({"c": 2, "d": 2}, {"shard": "d", "replicate": "c"}),
    ({"ddp": 4}, {"replicate": "ddp"}),
    ({"a": 2, "b": 1, "tp": 2}, {"shard": "b", "replicate": "a"}),
]
"""Meshes and data-parallel dims that torch's FSDP2 takes. No two are equal: it wants the very mesh of the parameters,
and DTensor's caches replace a mesh by an equal one.
"""


@pytest.mark.behaviour("C-16", "J-02")
@on_ranks(4, timeout=SECONDS)
def test_gradients_equal_those_of_ddp_and_fsdp2_for_sharded_and_replicated_inputs() -> None:
    for sizes, names in PEER_MESHES:
        mesh, data = named_mesh(**sizes), [name for name in sizes if name != "tp"]
        rank, size, run = data_rank(mesh, data), prod(mesh[name].size() for name in data), play_on(mesh, data)
        reference, models = EVEN.build(), [EVEN.build(), EVEN.build()]
        for model, shard in zip(models, LIBRARIES, strict=True):
            place_pair(model, mesh)
            shard(model, mesh=mesh, dp_mesh_dims=peer.DataParallelMeshDims(**names))  # type: ignore[arg-type]
        for step in (0, 1):
            reference.zero_grad()
            for each in range(size):
                (EVEN.loss(reference, PAIR.batch_of(step, each)) / size).backward()
            for model in models:
                model.zero_grad()
                run(model, step, rank)
                for name, parameter in reference.named_parameters():
                    what = f"{type(model)} on {names}, step {step}, {name}"
                    assert_close(gradient_of(model, name), parameter.grad, msg=lambda m, what=what: f"{what}: {m}")  # type: ignore[misc]


class Mixed(nn.Module):
    """One of its gradients is partial on the data-parallel dim and one replicated, depending on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.ones(5))
        self.unseen = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a term that depends on the data, and one that does not, as a penalty."""
        return (self.seen * x).sum() + self.unseen.square().sum()


def each_rank_has_a_loss() -> None:
    """Check that both terms are in every rank's loss, which are averaged, as in DDP and torch's FSDP2."""
    mesh, rank = named_mesh(dp=2), dist.get_rank()
    x, reference = torch.arange(20.0).view(4, 5), Mixed()
    for half in x.chunk(2):
        (reference(half) / 2).backward()
    for shard in LIBRARIES:
        arrived: dict[str, tuple[Placement, ...]] = {}
        model: Any = place_replicated(Mixed(), mesh)
        shard(model, mesh=mesh, dp_mesh_dims=peer.DataParallelMeshDims(shard="dp"))

        def note(name: str, gradient: Any, arrived: dict[str, tuple[Placement, ...]] = arrived) -> None:
            arrived[name] = gradient.placements

        def watchdog(module: nn.Module, _: object, note: Callable[[str, torch.Tensor], None] = note) -> None:
            for name, parameter in module.named_parameters():
                parameter.register_hook(partial(note, name))

        model.register_forward_pre_hook(watchdog)
        own = DTensor.from_local(x.chunk(2)[rank], mesh, [Shard(0)])
        model(own).full_tensor().backward()
        assert arrived == {"seen": (Partial(),), "unseen": (Replicate(),)}
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert_exact(gradient_of(model, name), parameter.grad, f"{shard.__module__}: {name}")


def place_replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    distribute_module(model, mesh)
    return model


def gradient_of(model: Any, name: str) -> torch.Tensor:
    gradient = model.get_parameter(name).grad
    return gradient.full_tensor()


class EqualLayers(nn.Module):
    """Two parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one: Any = self.one
        other: Any = self.other
        return ((one.to_local() + other.to_local()) * x[0]).sum()


class Rows(nn.Module):
    """A parameter with a row for each sample, whose gradient is sharded like the samples."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def arrives_cut_or_otherwise_than_before() -> None:
    """With torch's FSDP2 the first case raises, and accumulated microbatches are summed wrongly."""
    mesh, rank = named_mesh(dp=2), dist.get_rank()
    dims = peer.DataParallelMeshDims(shard="dp")
    x = torch.full((2, 3), 1.0 + rank)
    for shard in LIBRARIES:
        model = place_replicated(Rows(4, 3), mesh)
        shard(model, mesh=mesh, dp_mesh_dims=dims)
        loss = model(DTensor.from_local(x, mesh, [Shard(0)]))
        if shard is peer.fully_shard:
            with pytest.raises(RuntimeError, match="out of bounds for storage of size 12"):
                loss.backward()
        else:
            loss.backward()
            assert_exact(gradient_of(model, "weight"), torch.tensor([0.5, 0.5, 1.0, 1.0])[:, None].expand(4, 3), "cut")

    found: list[list[float]] = []
    for shard in LIBRARIES:
        for placed in ([Replicate(), Shard(0)], [Shard(0), Replicate()]):
            held: Any = place_replicated(Rows(3), mesh)
            shard(held, mesh=mesh, dp_mesh_dims=dims)
            for microbatch, placement in enumerate(placed):
                held.set_requires_gradient_sync(microbatch == 1)
                held(DTensor.from_local(x, mesh, [placement], run_check=False)).backward()
            found.append(gradient_of(held, "weight").unique().tolist())
    assert found == [[6.0], [6.0], [9.0], [4.5]]

    grid, found = named_mesh(replicate=1, shard=2, tp=1), []
    for shard, options in (
        (fully_shard, {"mesh": mesh, "dp_mesh_dims": dims}),
        (fully_shard, {"mesh": grid["replicate", "shard"]}),
        (peer.fully_shard, {"mesh": mesh, "dp_mesh_dims": dims}),
    ):
        module: Any = place_replicated(EqualLayers(), mesh if "dp_mesh_dims" in options else grid["tp"])
        shard(module, **options)
        for microbatch in (0, 1):
            module.set_requires_gradient_sync(microbatch == 1)
            module(x).backward()
        found += [gradient_of(module, name).unique().tolist() for name in ("one", "other")]
    assert found == [*[[3.0]] * 4, *[[4.5]] * 2], "the gradients must not share memory, as they do in torch's FSDP2"


@pytest.mark.behaviour("C-16", "J-02")
def test_partial_replicated_and_cut_gradients_belong_to_the_loss_of_their_rank() -> None:
    run_ranks(each_rank_has_a_loss, 2)
    run_ranks(arrives_cut_or_otherwise_than_before, 2)
