"""Compares training runs: sharded runs with the unsharded reference, and this library with torch's FSDP2. A *play* is a
function that runs the forwards and backwards of one step on one rank's data. The reference runs the plays of all ranks
in turn on one unsharded model and divides the summed gradients by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composable_fsdp import fully_shard
from tests.helpers.models import TASKS, shard_layers

Play = Callable[[nn.Module, int, int], torch.Tensor]
"""``(model, step, rank) -> loss``: runs forward and backward, and returns the loss."""

Between = Callable[[nn.Module, int], None]
"""``(model, step)``: runs between the last backward of a step and the optimizer's step."""

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Any]
"""Makes an object with the methods ``step`` and ``zero_grad``."""

# Adam divides by the magnitude of the gradient. If the gradient is only rounding, eps prevents divergence.
_ADAM: dict[str, Any] = {"lr": 3e-3, "eps": 1e-5}

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam-foreach": lambda p: torch.optim.Adam(p, foreach=True, **_ADAM),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True, **_ADAM),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True, weight_decay=0.1, **_ADAM),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True, weight_decay=0.1, **_ADAM),
}


@dataclass
class Run:
    """The results of a training run: this rank's losses, all parameters, and the gradients of the last step."""

    losses: list[torch.Tensor] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


def play_task(name: str) -> Play:
    task = TASKS[name]

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        device = next(model.parameters()).device
        loss = task.loss(model, tuple(t.to(device) for t in task.batch_of(step, rank)))
        loss.backward()
        return loss.detach()

    return play


def train(
    model: nn.Module,
    play: Play,
    make_optimizer: OptimizerFactory = OPTIMIZERS["sgd"],
    *,
    ranks: Iterable[int],
    watched: int,
    divide: int = 1,
    steps: int = 5,
    between: Between | None = None,
) -> Run:
    """Train ``model`` and keep the losses of rank ``watched``. ``ranks``: the ranks whose plays run on this model. A
    sharded model runs one play, a reference runs all. ``watched``: the rank whose losses are kept. ``divide``: the
    divisor of gradients before the optimizer's step."""
    parameters = dict(model.named_parameters())  # modules return other objects while parameters are unsharded
    optimizer, run = make_optimizer(parameters.values()), Run()
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            loss = play(model, step, rank)
            if rank == watched:
                run.losses.append(loss)
        if divide != 1:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(divide)
        if between is not None:
            between(model, step)
        optimizer.step()
    run.parameters = {name: copy_on_cpu(p) for name, p in parameters.items()}
    run.gradients = {name: None if p.grad is None else copy_on_cpu(p.grad) for name, p in parameters.items()}
    return run


def copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on CPU. The copy of a DTensor is a DTensor with this rank's shard."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        local = tensor.to_local().cpu().clone()
        return DTensor(local, tensor._spec, requires_grad=False)
    return tensor.cpu().clone()


def local_shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    if isinstance(like, DTensor):
        for axis, placement in enumerate(like.placements):
            if isinstance(placement, Shard):
                mesh, dim = like.device_mesh, placement.dim
                pieces = tensor.chunk(mesh.size(axis), dim)
                rank = mesh.get_local_rank(axis)
                tensor = pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)
    return tensor


def assert_equal_runs(actual: Run, expected: Run, *, what: str = "", exact: bool = False) -> None:
    """Check that losses, parameters and gradients are equal within fp32 tolerances, or bitwise if ``exact``. Each rank
    compares its shards of sharded tensors with the shards that ``torch.chunk`` gives."""
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    for step, (a, b) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        torch.testing.assert_close(a.cpu(), b.cpu(), **tolerance, msg=_message(f"{what} loss of step {step}"))
    assert actual.parameters.keys() == expected.parameters.keys()
    missing = [[name for name, g in run.gradients.items() if g is None] for run in (actual, expected)]
    assert missing[0] == missing[1], f"{what}: parameters without gradient: {missing[0]}, expected {missing[1]}"
    pairs = [(name, actual.parameters[name], value) for name, value in expected.parameters.items()]
    for name, gradient in actual.gradients.items():
        expected_gradient = expected.gradients[name]
        if gradient is not None and expected_gradient is not None:
            pairs.append((f"gradient of {name}", gradient, expected_gradient))
    for name, a, b in pairs:
        torch.testing.assert_close(local_shard(a, b), local_shard(b, a), **tolerance, msg=_message(f"{what} {name}"))


def _message(what: str) -> Callable[[str], str]:
    return lambda text: f"{what}: {text}"


def check_parity(
    build: Callable[[], nn.Module],
    play: Play,
    make_optimizer: OptimizerFactory = OPTIMIZERS["sgd"],
    *,
    shard: Callable[[nn.Module], Any] | None = None,
    steps: int = 5,
    between: Between | None = None,
    what: str = "",
    exact: bool = False,
    device: str = "cpu",
    **options: Any,
) -> Any:
    """Train the sharded model and the unsharded reference on this rank, compare them, and return the sharded one.
    ``shard``: a function that shards the model. The default shards every module in ``model.layers`` and the model, with
    ``options``. ``between``: a function that both runs call between the last backward of a step and the optimizer's
    step. ``device``: the device of the reference."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build()
    if shard is None:
        shard_layers(model, fully_shard, **options)
    else:
        shard(model)
    ours = train(model, play, make_optimizer, ranks=[rank], watched=rank, steps=steps, between=between)
    all_ranks = range(world_size)
    expected = train(
        build().to(device),
        play,
        make_optimizer,
        ranks=all_ranks,
        watched=rank,
        divide=world_size,
        steps=steps,
        between=between,
    )
    assert_equal_runs(ours, expected, what=what, exact=exact)
    return model
