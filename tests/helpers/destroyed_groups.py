"""Programs that destroy the default process group while work is in flight, and end. Run it as torchrun does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard


def build() -> Any:
    """Return a model on a mesh of all ranks, after two steps."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_schedule(max_fused_bytes=0)
    for _ in range(2):
        _step(model)
    return model


def _step(model: Any) -> None:
    model(torch.ones(2, 16)).sum().backward()


def _wait_for_a_gather(model: Any) -> Iterator[None]:
    handle = model[0].unshard(async_op=True)
    yield
    handle.wait()


def _free_a_gather(model: Any) -> Iterator[None]:
    model[1].unshard(async_op=True)
    yield
    model[1].reshard()


def _reset_after_forward(model: Any) -> Iterator[None]:
    loss = model(torch.ones(2, 16)).sum()
    yield
    model.reset_iter_state()
    del loss


def _finalize(model: Any) -> Iterator[None]:
    model.set_manual_backward_finalization(True)
    _step(model)
    yield
    model.finalize_backward()


def _step_with_reductions_in_flight(model: Any) -> Iterator[None]:
    model.set_is_last_backward(False)
    _step(model)
    yield
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _read_the_state(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    _step(model)
    model[0].unshard(async_op=True)
    yield
    model.state_dict()


def _drop_the_model(model: Any) -> Iterator[None]:
    loss = model(torch.ones(2, 16)).sum()
    model[0].unshard(async_op=True)
    yield
    del model, loss


PROGRAMS: dict[str, Callable[[Any], Iterator[None]]] = {
    "wait for a gather": _wait_for_a_gather,
    "free a gather": _free_a_gather,
    "reset after forward": _reset_after_forward,
    "finalize": _finalize,
    "step with reductions in flight": _step_with_reductions_in_flight,
    "read the state": _read_the_state,
    "drop the model": _drop_the_model,
}
"""Each yields where the default process group is destroyed."""


def main(folder: str, rank: int, size: int) -> None:
    """Run all programs, and end with work in flight and without destroying the process group."""
    for number, program in enumerate([*PROGRAMS.values(), _drop_the_model]):
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{number}", size), rank=rank, world_size=size)
        running = program(build())
        next(running)
        if number == len(PROGRAMS):
            return
        dist.destroy_process_group()
        next(running, None)


if __name__ == "__main__":
    from os import environ

    main(sys.argv[1], int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    sys.stdout.write("came to the end\n")
