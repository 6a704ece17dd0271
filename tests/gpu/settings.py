"""Trainings in many settings that each rank runs on its GPU, or on CPU. Results are those of the unsharded model."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composable_fsdp import FSDPModule, MixedPrecisionPolicy, checkpoint, fully_shard, initialize, unsharded_params
from tests.gpu.sharing import mesh_on, without_warnings_of_torch
from tests.helpers.model_parallel import PAIRS, parallelize_pairs
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.training import OPTIMIZERS, check_parity, play_task

TASK = TASKS["tied"]
FAILING_STEP = 2


def recomputed() -> nn.Module:
    model = TASK.build()
    layers = model.get_submodule("layers")
    for name, layer in list(layers.named_children()):
        layers.register_module(name, checkpoint_wrapper(layer))
    return model


def play_two_batches(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Accumulate the gradients of two batches, of which only the last one is followed by a reduction."""
    losses = []
    for number in range(2):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == 1)
        losses.append(play_task("tied")(model, 2 * step + number, rank))
    return torch.stack(losses)


def play_after_an_exception(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Run a step of which the forward fails first, on all ranks, and again after ``reset_iter_state()``."""
    if step == FAILING_STEP and isinstance(model, FSDPModule):

        def fail(*_: object) -> None:
            raise ArithmeticError("test failure")

        last = list(model.get_submodule("layers").children())[-1]
        handle = last.register_forward_pre_hook(fail)
        try:
            play_task("tied")(model, step, rank)
        except ArithmeticError:
            handle.remove()
            model.reset_iter_state()
        else:
            raise AssertionError("the forward did not fail")
    return play_task("tied")(model, step, rank)


def play_with_evaluation(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Read full parameters and evaluate before the step."""
    with torch.no_grad():
        evaluated = TASK.loss(model, on_device_of(model, TASK.batch_of(step, rank)))
        with unsharded_params(model) if isinstance(model, FSDPModule) else nullcontext():
            total = torch.stack([p.sum() for p in model.parameters()]).sum()
    return torch.stack([evaluated, total, play_task("tied")(model, step, rank)])


def on_device_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    device = next(model.parameters()).device
    return tuple(tensor.to(device) for tensor in batch)


def clip(model: nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def shard_with_lists(model: nn.Module, **options: Any) -> nn.Module:
    """Shard with lists of prefetches two layers ahead."""
    shard_layers(model, fully_shard, fuses=False, **options)
    layers: list[Any] = list(model.get_submodule("layers").children())
    for first, second in pairwise(layers):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    return model


def shard_within(model: nn.Module, **options: Any) -> nn.Module:
    """Shard with a bound of unsharded bytes that allows no prefetch."""
    shard_layers(model, fully_shard, fuses=False, **options)
    model.set_schedule(max_unsharded_bytes=1)  # type: ignore[operator]
    return model


def train_in_settings(device: str) -> list[str]:
    """Train in each setting, compare, and return their names."""
    mesh, done = mesh_on(device), []

    def check(name: str, build: Any = TASK.build, play: Any = None, shard: Any = None, **options: Any) -> None:
        play = play or play_task("tied")
        options = {"mesh": mesh} | options
        if shard is not None:
            chosen, sharding = shard, {key: options.pop(key) for key in list(options) if key != "between"}
            options["shard"] = lambda model: chosen(model, **sharding)
        check_parity(build, play, OPTIMIZERS["sgd"], what=name, device=device, **options)
        done.append(name)

    check("fused")
    check("not fused", fuses=False)
    check("kept", reshard_after_forward=False)
    check("recomputed", recomputed)
    check("recomputed, kept", recomputed, reshard_after_forward=False)
    check("accumulated", play=play_two_batches)
    check("after an exception", play=play_after_an_exception)
    check("evaluated", play=play_with_evaluation)
    check("clipped", between=clip)
    check("prefetch lists", shard=shard_with_lists)
    check("within a bound", shard=shard_within)
    if dist.get_world_size() > 1:
        hybrid = mesh_on(device, "replicate", "shard")
        for reshard in (True, False):
            check(f"hybrid, {reshard}", mesh=hybrid, reshard_after_forward=reshard)
        check("hybrid, accumulated", play=play_two_batches, mesh=hybrid)
        train_tensor_parallel(device)
        done.append("tensor parallel")
    return done


def train_tensor_parallel(device: str) -> None:
    """Train pairs of column- and row-wise parallel layers on two ranks, sharded over the others."""
    mesh = mesh_on(device, "tp", "dp")
    data_parallel, rank = mesh["dp"], mesh.get_local_rank("dp")
    model = PAIRS.build().to(device)
    parallelize_pairs(model, mesh["tp"])
    shard_layers(model, fully_shard, mesh=mesh["dp"])
    reference = PAIRS.build().to(device)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)]
    for step in range(4):
        batches = [on_device_of(reference, PAIRS.batch_of(step, each)) for each in range(data_parallel.size())]
        loss = PAIRS.loss(model, batches[rank])
        loss.backward()
        expected = [PAIRS.loss(reference, batch) for batch in batches]
        torch.stack(expected).mean().backward()
        torch.testing.assert_close(loss.detach(), expected[rank].detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close({name: full[name]}, {name: value.cpu()})


def train_compiled(device: str) -> None:
    """Train with blocks, and with a whole model, that ``torch.compile`` compiles for the device."""
    mesh = mesh_on(device)

    def shard_compiled_blocks(model: nn.Module) -> None:
        for layer in model.get_submodule("layers").children():
            layer.compile()
        shard_layers(model, fully_shard, mesh=mesh)

    def shard_and_compile(model: nn.Module) -> None:
        shard_layers(model, fully_shard, mesh=mesh).compile()

    with without_warnings_of_torch():
        for shard in (shard_compiled_blocks, shard_and_compile):
            torch._dynamo.reset()
            check_parity(
                TASKS["chain"].build, play_task("chain"), what=shard.__name__, device=device, shard=shard, steps=4
            )


def initialize_on_device(device: str) -> None:
    """Initialize from the meta device, twice with one seed: equal values, and those of the same draw on all ranks."""
    mesh = mesh_on(device)
    found = []
    for seed in (0, 0, 1):
        with torch.device("meta"):
            model = TASK.build()
        shard_layers(model, fully_shard, mesh=mesh)
        initialize(model, seed=seed)
        assert {p.device.type for p in model.parameters()} == {device}
        found.append(checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True)))
    first, same, other = found
    assert all(torch.equal(same[name], value) for name, value in first.items())
    assert not all(torch.equal(other[name], value) for name, value in first.items())
    everywhere: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, first)
    for values in everywhere:
        assert all(torch.equal(values[name], value) for name, value in first.items())


def save_in_background(device: str, folder: Path) -> None:
    """Save while training goes on, and load what was saved."""
    model = shard_layers(TASK.build(), fully_shard, mesh=mesh_on(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        play_task("tied")(model, number, dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    expected = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True))
    pending = checkpoint.save(folder, model, optimizer, asynchronous=True, timeout=60)
    for number in range(1, 5):
        step(number)
    pending.wait()
    changed = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True))
    assert not all(torch.equal(changed[name], value) for name, value in expected.items())
    checkpoint.load(folder, model, optimizer)
    loaded = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True))
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def wait_for_a_missing_rank(device: str, seconds: float) -> str:
    """Have the last rank leave out a step. Return the error of this rank, and the seconds until it was raised. NCCL
    ends the process after ``seconds`` on its own."""
    mesh = mesh_on(device, timeout=timedelta(seconds=seconds))
    model = shard_layers(TASK.build(), fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    for number in range(2):
        play_task("tied")(model, number, dist.get_rank())
    torch.accelerator.synchronize()
    begin = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds - 1)
        return ""
    try:
        play_task("tied")(model, 2, dist.get_rank())
        torch.accelerator.synchronize()
    except Exception as error:
        return f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}"
    return "no error"
