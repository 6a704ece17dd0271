"""Checks for CUDA that each rank runs. With ``device="cpu"`` most of them also run without an accelerator. Ranks
communicate over their own process group (NCCL on CUDA, and gloo for CPU tensors, which offloading warns about else) in
addition to the gloo group of the test kit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from composable_fsdp import (
    Cast,
    CommunicationPolicy,
    CPUOffloadPolicy,
    ErrorFeedback,
    Float8,
    Int4,
    Int8,
    MixedPrecisionPolicy,
    checkpoint,
    fully_shard,
)
from composable_fsdp.errors import ParameterError
from composable_fsdp.trace import Recorder
from tests.gpu.sharing import mesh_on, without_warnings_of_torch
from tests.helpers.assert_trace import ledger
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.training import OPTIMIZERS, assert_equal_runs, check_parity, play_task, train

COMBINATIONS = (("mlp", "sgd"), ("wide", "adamw-fused"), ("transformer", "adam-foreach"), ("tied", "adamw-foreach"))


def train_with_parity(device: str, reshard_after_forward: bool | int | None) -> None:
    mesh = mesh_on(device)
    for task, optimizer in COMBINATIONS:
        with Recorder() as recorder:
            model = check_parity(
                TASKS[task].build,
                play_task(task),
                OPTIMIZERS[optimizer],
                what=f"{task}, {optimizer}",
                device=device,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
            )
        assert ledger(recorder) == {}
        assert all(p.device.type == device for p in model.parameters())


def compare_with_peer(device: str, options: dict[str, Any]) -> None:
    """Train five steps with both libraries; on up to two ranks, results are bitwise equal."""
    mesh, rank = mesh_on(device), dist.get_rank()
    for task, optimizer in COMBINATIONS:
        ours, theirs = (
            train(
                shard_layers(TASKS[task].build().to(device), shard, mesh=mesh, mp_policy=policy),
                play_task(task),
                OPTIMIZERS[optimizer],
                ranks=[rank],
                watched=rank,
            )
            for shard, policy in (
                (fully_shard, MixedPrecisionPolicy(**options)),
                (peer.fully_shard, peer.MixedPrecisionPolicy(**options)),
            )
        )
        assert_equal_runs(ours, theirs, what=f"{task}, {optimizer}", exact=dist.get_world_size() <= 2)


def move_from_cpu() -> None:
    """Shard a model that was built on CPU, with persistent and non-persistent buffers, over a mesh of GPUs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, device="cuda"))
    model.register_buffer("extra", torch.ones(3), persistent=False)
    fully_shard(model, mesh=mesh_on("cuda"))
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    index = torch.cuda.current_device()
    named = fully_shard(nn.Linear(4, 4), mesh=mesh_on("cuda"), device=index)
    assert named.weight.device == torch.device("cuda", index)


def average_weights(device: str) -> None:
    """Check that torch's averages of a sharded model are kept on the device, and that it computes with them."""
    mesh, task = mesh_on(device), TASKS["mlp"]
    model = shard_layers(task.build(), fully_shard, mesh=mesh)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    before = [cast(DTensor, parameter).to_local().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    averaged.update_parameters(model)
    for average, value in zip(averaged.module.parameters(), before, strict=True):
        torch.testing.assert_close(cast(DTensor, average).to_local(), value + 0.5)
    inputs, _ = task.batch_of(0, dist.get_rank())
    with torch.no_grad():
        assert averaged(inputs.to(device)).isfinite().all()


def train_offloaded(device: str, pin_memory: bool) -> None:
    """Train with shards, gradients and optimizer state on CPU and computation on the device."""
    mesh = mesh_on(device)
    for task, optimizer in (("wide", "adamw-foreach"), ("tied", "sgd")):
        model = check_parity(
            TASKS[task].build,
            play_task(task),
            OPTIMIZERS[optimizer],
            what=task,
            device=device,
            mesh=mesh,
            offload_policy=CPUOffloadPolicy(pin_memory=pin_memory),
        )
        for name, parameter in model.named_parameters():
            for local in (parameter.to_local(), parameter.grad.to_local()):
                assert local.device.type == "cpu", name
                if device == "cuda" and local.numel():
                    assert local.is_pinned() == pin_memory, name
    if device == "cuda":
        model = shard_layers(TASKS["mlp"].build(), fully_shard, mesh=mesh, offload_policy=CPUOffloadPolicy())
        model.to("cuda")
        with pytest.raises(ParameterError, match=r"scale.*cuda"):
            model(TASKS["mlp"].batch_of(0, 0)[0].cuda())


def watch_memory() -> None:
    """Check in the allocator's statistics that no full parameter remains after forward and after backward."""
    task, rank = TASKS["wide"], dist.get_rank()
    batch = tuple(t.cuda() for t in task.batch_of(0, rank))
    mesh = mesh_on("cuda")
    # In bf16, full parameters are separate from the shards even on a single rank.
    model = shard_layers(
        task.build(), fully_shard, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
    )
    task.loss(model, batch).backward()  # cuBLAS and NCCL have allocated their memory now
    model.zero_grad()
    full = sum(p.numel() for p in model.parameters()) * torch.bfloat16.itemsize
    shards = sum(p.to_local().nbytes for p in model.parameters())
    slack = full // 8  # for activations and the allocator's rounding
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = task.loss(model, batch)
        assert torch.cuda.memory_allocated() - before < slack, "memory is held after forward"
        assert torch.cuda.max_memory_allocated() - before > full // 3, "the largest layer was never unsharded"
        loss.backward()
        del loss
        assert torch.cuda.memory_allocated() - before < shards + slack, "memory is held after backward"
        model.zero_grad()
        assert torch.cuda.memory_allocated() - before < slack, "memory is held after zero_grad"


CODECS = (Int8(), Int4(), Float8(), Float8(block=64), Cast(), Cast(torch.float16))


def encode_as_on_cpu(device: str) -> None:
    """Compare encode and decode of every codec with CPU. The last bit of a division depends on the device, and so does
    the last bit of a scale. A value that lies between two codes may then get the other one, which is rare."""
    rows = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 5000)
    rows[2, 7] = torch.nan
    with without_warnings_of_torch():
        for codec in CODECS:
            expected, payload = codec.encode(rows), codec.encode(rows.to(device))
            assert payload.shape == expected.shape, codec
            reference = codec.decode(expected, rows.size(1))
            values = codec.decode(expected.to(device), rows.size(1)).cpu()
            torch.testing.assert_close(values, reference, equal_nan=True, msg=repr(codec))
            encoded_there = codec.decode(payload, rows.size(1)).cpu()
            is_close = torch.isclose(encoded_there, reference, rtol=1e-5, atol=0, equal_nan=True)
            assert is_close.float().mean() > 0.999, f"{codec}: {(~is_close).sum()} values differ"


def train_encoded(device: str) -> None:
    """Compare training with encoded parameters and gradients on overlapping streams with training without codecs."""
    mesh, rank, task = mesh_on(device), dist.get_rank(), TASKS["transformer"]
    policy = CommunicationPolicy(Int8(), ErrorFeedback(Int8()), min_numel=64)
    last = []
    for chosen in (None, policy):
        model = shard_layers(task.build(), fully_shard, mesh=mesh, comm_policy=chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = tuple(t.to(device) for t in task.batch_of(0, rank))
        losses = []
        with without_warnings_of_torch():
            for _ in range(10):
                optimizer.zero_grad()
                losses.append(task.loss(model, batch))
                losses[-1].backward()
                optimizer.step()
        last.append(losses[-1].item())
    assert abs(last[1] - last[0]) < 0.05 * abs(last[0]), last


def step_without_host_waiting(reshard_after_forward: bool | None) -> None:
    """Check that a step has no implicit or explicit synchronisation."""
    rank = dist.get_rank()
    task = TASKS["transformer"]
    model = shard_layers(
        task.build(),
        fully_shard,
        mesh=mesh_on("cuda"),
        reshard_after_forward=reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = tuple(t.cuda() for t in task.batch_of(0, rank))

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()

    for _ in range(2):
        step()
    with no_host_waits():
        step()
        with torch.no_grad():
            model(batch[0])


def states_between_devices(device: str) -> None:
    """Save every form of model and optimizer state on ``device`` and on CPU, and load each on both."""
    meshes = {"cpu": DeviceMesh("cpu", list(range(dist.get_world_size()))), device: mesh_on(device)}
    task = TASKS["transformer"]

    def trained(where: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard_layers(task.build(), fully_shard, mesh=meshes[where])
        optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
        for step in range(steps):
            task.loss(model, tuple(t.to(where) for t in task.batch_of(step, 0))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def full_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        state = checkpoint.optimizer_state_dict(model, optimizer, checkpoint.Full(offload_to_cpu=True))["state"]
        values = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True)).values()
        return [*values, *(value.cpu() for entry in state.values() for value in entry.values())]

    for source in meshes:
        model, optimizer = trained(source, 2)
        expected = full_values(model, optimizer)
        for form in (
            checkpoint.Sharded(),
            checkpoint.Sharded(offload_to_cpu=True),
            checkpoint.Local(),
            checkpoint.Full(),
            checkpoint.Full(rank0_only=True, offload_to_cpu=True),
        ):
            weights = checkpoint.state_dict(model, form)
            state = checkpoint.optimizer_state_dict(model, optimizer, form)
            for target in meshes:
                fresh, its_optimizer = trained(target, 0)
                checkpoint.load_state_dict(fresh, weights, form)
                checkpoint.load_optimizer_state_dict(fresh, its_optimizer, state, form)
                found = full_values(fresh, its_optimizer)
                assert all(map(torch.equal, found, expected)), f"{source} to {target}, {form}"
                assert {p.device.type for p in fresh.parameters()} == {target}
                assert {e["exp_avg"].device.type for e in its_optimizer.state.values()} == {target}


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Raise an error if the host waits for the device."""

    def refuse(*_: object) -> None:
        raise AssertionError("the host waited for the device")

    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            patch.setattr(owner, "synchronize", refuse)
        mode = torch.cuda.get_sync_debug_mode()
        with without_warnings_of_torch():
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
