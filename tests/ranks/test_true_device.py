"""Training on a device that is not the CPU: torch's PrivateUse1 over host memory, built where a compiler is present."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from composable_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    cpu_offload_by_budget,
    fully_shard,
    initialize,
    unsharded_params,
)
from composable_fsdp.errors import DeviceError
from tests.gpu import cases
from tests.helpers import true_device
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import OPTIMIZERS, assert_equal_runs, play_task, train

DEVICE = true_device.DEVICE


def train_on_both(mesh: DeviceMesh, what: str, *tasks: str, **options: Any) -> None:
    rank = dist.get_rank()
    on_cpu = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    for task in tasks:
        runs = [
            train(
                shard_layers(TASKS[task].build(), fully_shard, mesh=each, **options),
                play_task(task),
                OPTIMIZERS["sgd"],
                ranks=[rank],
                watched=rank,
            )
            for each in (mesh, on_cpu)
        ]
        for run in runs:
            run.losses = [loss.cpu() for loss in run.losses]
            run.parameters = {name: value.cpu() for name, value in run.parameters.items()}
            run.gradients = {name: value if value is None else value.cpu() for name, value in run.gradients.items()}
        assert_equal_runs(*runs, what=f"{what}, {task}", exact=True)


def offload_a_part(mesh: DeviceMesh) -> None:
    task, rank, results = TASKS["wide"], dist.get_rank(), []
    for each in (mesh, DeviceMesh("cpu", mesh.mesh)):
        with torch.device("meta"):
            model = task.build()
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        chosen = cpu_offload_by_budget(model, size // 2)
        fully_shard(model, mesh=each, policy={nn.Linear}, offload_policy=chosen)
        initialize(model, seed=0)
        assert 0 < len(chosen) < len(list(model.parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        values: list[torch.Tensor] = []
        for step in range(3):
            batch = tuple(t.to(each.device_type) for t in task.batch_of(step, rank))
            task.loss(model, batch).backward()
            norm = clip_grad_norm_(model, 0.1)
            values.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu())
            for name, parameter in model.named_parameters():
                expected = "cpu" if name in chosen else each.device_type
                assert (parameter.to_local().device.type, parameter.grad.to_local().device.type) == (expected,) * 2, (
                    name
                )
            optimizer.step()
            optimizer.zero_grad()
        with unsharded_params(model, writeback=True, offload_to_cpu=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        full = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True))
        results.append([*values, *full.values()])
    for ours, expected_value in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected_value)
    one = fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy={"bias": CPUOffloadPolicy()})
    one.to(mesh.device_type)
    with pytest.raises(DeviceError, match=rf"'bias': '{DEVICE}:{rank}, not cpu'}}. Leave out model.to"):
        one(torch.ones(1, 4, device=mesh.device_type))


def assign_to_offloaded(mesh: DeviceMesh) -> None:
    """Assign a state dict in parts to offloaded shards on meta: on the host, and on the device, which is an error."""
    on_host = CPUOffloadPolicy(pin_memory=False)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    x = torch.ones(1, 4, device=mesh.device_type)
    for offload, error in ((on_host, None), (None, rf"on CPU if they are offloaded: .*'0.weight': '{DEVICE}")):
        source = fully_shard(build(), mesh=mesh, offload_policy=offload)
        with torch.device("meta"):
            model = build()
        fully_shard(model, mesh=mesh, offload_policy=on_host)
        for name, value in source.state_dict().items():
            model.load_state_dict({name: value}, assign=True, strict=False)
        if error is not None:
            with pytest.raises(DeviceError, match=error):
                model(x)
            continue
        assert torch.equal(model(x), source(x))
        assert {value.to_local().device.type for value in model.state_dict().values()} == {"cpu"}


def accumulate_clip_and_save(folder: str) -> None:
    """Train from the meta device with accumulation and clipping, and restore it from a checkpoint, on both devices."""
    rank, task, results = dist.get_rank(), TASKS["transformer"], []
    for kind in ("cpu", DEVICE):
        with torch.device("meta"):
            model = shard_layers(task.build(), fully_shard, mesh=init_device_mesh(kind, (2,)))
        model.to_empty(device=kind)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                local = parameter.to_local()
                local.copy_(torch.randn(local.shape, generator=torch.Generator().manual_seed(number * 2 + rank)) / 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        values = []
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            loss = task.loss(model, tuple(t.to(kind) for t in task.batch_of(step, rank)))
            loss.backward()
            values.append(loss.detach().cpu())
            if step % 2:
                norm = clip_grad_norm_(model, 0.1)
                values.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu())
                optimizer.step()
                optimizer.zero_grad()
        full = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True))
        path = Path(folder) / kind
        checkpoint.save(path, model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpoint.load(path, model, optimizer)
        loaded = checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True))
        assert all(torch.equal(loaded[name], value) for name, value in full.items())
        assert {p.device.type for p in model.parameters()} == {kind}
        results.append([*values, *full.values()])
    assert all(map(torch.equal, *results))


def initialize_offloaded(mesh: DeviceMesh) -> None:
    results = []
    for each in (mesh, DeviceMesh("cpu", mesh.mesh)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        fully_shard(model, mesh=each, offload_policy=CPUOffloadPolicy())
        initialize(model, seed=0)
        with unsharded_params(model, writeback=True, offload_to_cpu=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        assert {cast(DTensor, p).to_local().device.type for p in model.parameters()} == {"cpu"}
        results.append(list(checkpoint.state_dict(model, checkpoint.Full(offload_to_cpu=True)).values()))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def check_device(folder: str) -> dict[str, int]:
    """Train in many settings on the device, which this process has from now on. Return what the device counted."""
    device, rank = true_device.register(), dist.get_rank()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else Module.to() unties weights on such a device
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(f"cpu:gloo,{DEVICE}:{true_device.BACKEND}", store=store, rank=rank, world_size=2)
    device.set_device(rank)
    assert fully_shard(nn.Linear(4, 4)).weight.device == torch.device(DEVICE, rank)
    mesh = init_device_mesh(DEVICE, (2,))
    # The device has only this kernel of attention. On CPU another one would compute other bits.
    with sdpa_kernel(SDPBackend.MATH):
        train_on_both(mesh, "fp32", "mlp", "tied")
        train_on_both(mesh, "kept", "tied", reshard_after_forward=False)
        train_on_both(mesh, "bf16", "tied", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        train_on_both(init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard")), "hybrid", "tied")
        accumulate_clip_and_save(folder)
        initialize_offloaded(mesh)
        offload_a_part(mesh)
        assign_to_offloaded(mesh)
        cases.states_between_devices(DEVICE)
        cases.compare_with_peer(DEVICE, {"param_dtype": torch.bfloat16})
        before = device.counts()["pinned_copies"]
        cases.train_offloaded(DEVICE, False)
        assert device.counts()["pinned_copies"] == before
        cases.train_offloaded(DEVICE, True)
    return cast(dict[str, int], device.counts())


@pytest.mark.behaviour("D-02", "F-06")
@pytest.mark.skipif("TRUE_DEVICE" not in os.environ, reason="the device takes a minute to build: make true-device")
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written for the headers of torch 2.13")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler g++ for a device of tests")
def test_training_on_a_true_device_equals_training_on_cpu(tmp_path: Path) -> None:
    true_device.build()
    # The variable gives these ranks processes of their own: torch keeps the device until they end.
    for counts in run_ranks(check_device, 2, str(tmp_path), environment={"TEST_DEVICE": DEVICE}, timeout=240):
        assert counts["pinned_copies"] > 0
        assert counts["streams"] > 0
