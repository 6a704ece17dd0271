"""Trainings on the simulated accelerator that together use everything of the library that runs on streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from composable_fsdp import CommunicationPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_fsdp.checkpoint import Full, save, state_dict
from composable_fsdp.codecs import ErrorFeedback, Int8
from tests._internals import PendingSave, checkpoint_save
from tests.helpers.extension_tensors import Pair, with_weights
from tests.helpers.simulated_offload import simulated_offload
from tests.simulation.nccl import alone_backend

WIDTH, STEPS = 64, 3
SECOND_STEP_TWICE = {1: 1}


@contextmanager
def alone(shards: int = 4) -> Iterator[DeviceMesh]:
    """Make a mesh of 2 replicas of ``shards``, of which only this process exists."""
    dist.init_process_group(alone_backend(), store=FakeStore(), rank=0, world_size=2 * shards)
    try:
        yield init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """Two linear layers, recomputed in backward if asked for."""

    recomputes = False
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("test failure")
        if self.recomputes:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)


def with_unused(*blocks: nn.Module) -> nn.Sequential:
    """Return a model of ``blocks``, each with a layer that no forward uses."""
    for block in blocks:
        block.unused = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*blocks)


class Branches(nn.Sequential):
    """Modules of which the second one runs on a stream of its own, at the same time as the first one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self
        current, side = torch.cpu.current_stream(), cast(Any, torch.cpu.Stream())
        side.wait_stream(current)
        y = first(x)
        with torch.cpu.stream(side):
            z = second(x)
        cast(Any, current).wait_stream(side)
        return third(y + z)


@simulated_offload()
def train(
    mesh: DeviceMesh,
    *,
    prepare: Callable[[Any], object] = id,
    library: Any = fully_shard,
    between: Callable[[Any], object] = id,
    kind: Any = None,
    build: Callable[..., nn.Sequential] = nn.Sequential,
    steps: int = STEPS,
    earlier: Mapping[int, int] = SECOND_STEP_TWICE,
    hold: str = "set_requires_gradient_sync",
    make_optimizer: Any = torch.optim.AdamW,
    updates_on: Callable[[Any], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> None:
    """Train some steps, the second of which runs twice without synchronizing gradients. ``prepare``: called with the
    sharded model. ``between``: called with the model after each step. ``kind``: a tensor class for the weights.
    ``build``: makes the model from three modules. ``steps``: the number of steps. ``earlier``: the number of backwards
    before the last one, by step. ``hold``: the setter of what these leave out. ``make_optimizer``: makes the optimizer.
    AdamW reads its number of steps on the host, which waits for all work. ``updates_on``: makes the context of the
    optimizer's steps from the model."""
    torch.manual_seed(0)
    model: Any = build(*(Block() for _ in range(3)))
    if kind is not None:
        with_weights(model, kind)
    for block in model:
        library(block, mesh=mesh, **options)
    library(model, mesh=mesh, **options)
    model[1].recomputes = kind is None
    prepare(model)
    optimizer = make_optimizer(model.parameters(), lr=1e-3, foreach=True)
    for step in range(steps):
        for is_last in [*[False] * earlier.get(step, 0), True]:
            getattr(model, hold)(is_last)
            model(torch.randn(8, WIDTH)).square().sum().backward()
        if kind is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with updates_on(model):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(8, WIDTH))
        between(model)


def _unfuse(model: Any) -> None:
    model.set_schedule(max_fused_bytes=0)


def _prefetch_by_list(model: Any) -> None:
    _unfuse(model)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])


def _hook_on_stream(model: Any) -> None:
    stream: Any = torch.cpu.Stream()
    for module in (*model, model):
        module.set_all_reduce_hook(lambda output: output.mul_(2), stream=stream)


def _hook(model: Any) -> None:
    for module in (*model, model):
        module.set_all_reduce_hook(lambda output: output.mul_(2))


def _adding_hook(model: Any) -> None:
    """Give each parameter a gradient, as a hook does that adds those of ranks outside of the mesh."""
    _unfuse(model)
    for block in model:
        block.set_all_reduce_hook(lambda output: output.add_(1))


def _fail(model: Any) -> None:
    """Fail in forward and in backward, with prefetched all-gathers and reductions in flight."""
    model[1].fails = True
    with suppress(ArithmeticError):
        model(torch.randn(8, WIDTH))
    model[1].fails = False
    model.reset_iter_state()
    loss = model(torch.randn(8, WIDTH)).square().sum()
    handle = model[0].layers[0].register_full_backward_pre_hook(_raise)
    with suppress(ArithmeticError):
        loss.backward()
    handle.remove()
    model.reset_iter_state()
    for parameter in model.parameters():
        parameter.grad = None


def _raise(*_: object) -> None:
    raise ArithmeticError("test failure")


def _unshard_by_hand(model: Any) -> None:
    handles = [block.unshard(async_op=True) for block in model]
    for handle in handles:
        handle.wait()
    model.unshard()
    model(torch.randn(8, WIDTH)).sum().backward()
    for module in (*model, model):
        module.reshard()
    model.zero_grad()


def _read_unsharded(model: Any) -> None:
    """Unshard in each way that there is, and read parameters without a forward."""
    for block in model:
        block.unshard(async_op=True).wait()
        _read_and_reshard(block)
        block.unshard()
        _read_and_reshard(block)


def _read_and_reshard(block: Any) -> None:
    weight = block.layers[0].weight
    assert not isinstance(weight, DTensor), "the parameters are sharded"
    assert weight.isfinite().all()
    block.reshard()


def _read_in_full(model: Any) -> None:
    assert state_dict(model, Full(offload_to_cpu=True))
    assert all(value.isfinite().all() for value in state_dict(model, Full()).values())


@contextmanager
def _on_own_stream(model: Any) -> Iterator[None]:
    """Update on a stream of its own, whose event the next forward waits for."""
    stream: Any = torch.cpu.Stream()
    stream.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(stream):
        yield
    model.set_post_optim_event(stream.record_event())


def _on_host(block: torch.Tensor | bytes) -> torch.Tensor | bytes:
    if isinstance(block, bytes):
        return block
    return torch.empty(block.shape, dtype=block.dtype, pin_memory=True).copy_(block.detach(), non_blocking=True)


def _save(model: Any) -> None:
    """Save in the background. The thread runs at once, since only this thread is simulated."""
    write_value = checkpoint_save.write_value

    def read(file: Any, value: Any) -> None:
        """Read the block by an operation, since writers of files read from its address."""
        assert not isinstance(value, torch.Tensor) or value.sum() is not None
        write_value(file, value)

    with (
        TemporaryDirectory() as folder,
        mock.patch.object(checkpoint_save, "_on_host", _on_host),
        mock.patch.object(checkpoint_save, "write_value", read),
        mock.patch.object(PendingSave, "start", lambda _, action: action()),
    ):
        save(folder, model, asynchronous=True)


def _set_optimizer_event(model: Any) -> None:
    model.set_post_optim_event(torch.cpu.current_stream().record_event())  # type: ignore[func-returns-value]


BF16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
INT8 = CommunicationPolicy(all_gather=Int8(), reduce_scatter=ErrorFeedback(Int8()), min_numel=1)
INT8_SUMS = CommunicationPolicy(reduce_scatter=Int8(), min_numel=1)


def _shard_with_weights_on_the_host(module: nn.Module, **options: Any) -> nn.Module:
    """Shard a block with its weights offloaded and its biases not, or the model, which has no parameters of its own."""
    chosen = {
        name: CPUOffloadPolicy() for name, p in module.named_parameters() if p.ndim == 2 and type(p) is nn.Parameter
    }
    return fully_shard(module, offload_policy=chosen, **options)


SETTINGS: dict[str, dict[str, Any]] = {
    "unfused": {"prepare": _unfuse},
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(**BF16)},
    "stays unsharded": {"reshard_after_forward": False},
    "deep prefetch": {"prepare": lambda model: (_unfuse(model), model.set_schedule(prefetch_limit=3))},  # type: ignore[func-returns-value]
    "prefetch lists": {"prepare": _prefetch_by_list},
    "smaller mesh": {"reshard_after_forward": 2},
    "own reduce group": {"prepare": lambda model: model.set_separate_reduce_scatter_group(True)},
    "bounded": {"prepare": lambda model: (_unfuse(model), model.set_schedule(max_unsharded_bytes=1 << 17))},  # type: ignore[func-returns-value]
    "one reduction in flight": {
        "prepare": lambda model: (_unfuse(model), model.set_reduce_scatter_max_input_buffers(1))  # type: ignore[func-returns-value]
    },
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, unfused, bf16": {
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(**BF16),
        "prepare": _unfuse,
    },
    "offload of weights only": {"library": _shard_with_weights_on_the_host},
    "unused parameters": {"build": with_unused, "prepare": _unfuse},
    "unused parameters and a hook": {"build": with_unused, "prepare": _adding_hook},
    "unused parameters reduced": {"prepare": lambda model: model.set_reduce_scatter_unused_params(True)},
    "sums held unsharded": {"hold": "set_requires_all_reduce", "prepare": _unfuse},
    "values of rank 0": {"sync_module_states": True},
    "own optimizer event": {"prepare": _set_optimizer_event, "between": _set_optimizer_event},
    "int8 both ways": {"comm_policy": INT8},
    "int8 sums": {"comm_policy": INT8_SUMS},
    "hook": {"prepare": _hook},
    "extension": {"kind": Pair},
    "after exceptions": {"prepare": _unfuse, "between": _fail},
    "unsharded by hand": {"between": _unshard_by_hand},
    "read in full": {"between": _read_in_full},
    "read unsharded": {"between": _read_unsharded},
    "updated on a stream": {"updates_on": _on_own_stream},
    "branches on streams": {"build": Branches},
    "branches on streams, unfused": {"build": Branches, "prepare": _unfuse},
}
"""Options of :func:`train`, for both kinds of mesh."""
ONE_SHARD = ("plain", "bf16", "offload, unfused, bf16", "own optimizer event", "after exceptions")
"""Those that are trained without sharding too."""


def train_alone(options: Mapping[str, Any], *, hybrid: bool, shards: int = 4) -> None:
    """Run :func:`train` on a mesh of which only this process exists."""
    with alone(shards) as mesh:
        train(mesh if hybrid else mesh["shard"], **options)


def _change_shards_after_forward(model: Any) -> None:
    """Write to shards between forward and backward, in a way that torch does not count."""

    def change(*_: object) -> None:
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                parameter.to_local().data.mul_(0.99)

    model.set_schedule(prefetch_limit=2, max_fused_bytes=0)
    model.register_forward_hook(change)


def _train_on_one_rank() -> None:
    dist.init_process_group(alone_backend(), store=FakeStore(), rank=0, world_size=1)
    try:
        train(init_device_mesh("cpu", (1,)), between=_save)
    finally:
        dist.destroy_process_group()


TRAININGS: dict[str, Callable[[], None]] = {
    **{f"{name}, sharded": partial(train_alone, each, hybrid=False) for name, each in SETTINGS.items()},
    **{f"{name}, hybrid": partial(train_alone, each, hybrid=True) for name, each in SETTINGS.items()},
    **{f"{name}, one shard": partial(train_alone, SETTINGS[name], hybrid=True, shards=1) for name in ONE_SHARD},
    "saved in the background": _train_on_one_rank,
    "hook on a stream": partial(train_alone, {"prepare": _hook_on_stream}, hybrid=False),
    "shards changed after forward": partial(train_alone, {"prepare": _change_shards_after_forward}, hybrid=False),
}
