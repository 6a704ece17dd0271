"""Trains one model on all ranks with each of the libraries that ``step_time.py`` compares."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed.fsdp as torch_fsdp
from libraries import LIBRARIES, prefetch_explicitly, shard
from models import Case
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from composable_fsdp import local_optimizer

__all__ = ["FSDP2", "FSDP2_PREFETCH", "OPTIMIZERS", "OURS", "TRAINERS", "Task", "absent"]

OURS, FSDP2, FSDP2_PREFETCH = "ours", "fsdp2", "fsdp2 prefetch"
LEARNING_RATE = 1e-4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
}

Step = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Task:
    """A model and its training options."""

    case: Case
    mesh: DeviceMesh
    bf16: bool
    optimizer: str
    local: bool

    def step(self, model: nn.Module, *, local: bool = False) -> Step:
        """Run forward, backward and an update of ``model``, whose output is the loss."""
        optimizer = OPTIMIZERS[self.optimizer](model.parameters(), lr=LEARNING_RATE)
        if local:
            local_optimizer(optimizer)

        def run(batch: torch.Tensor) -> None:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    def unsharded(self) -> nn.Module:
        model = self.case.build()
        return model.bfloat16() if self.bf16 else model


def by_fully_shard(task: Task, library: str, *, prefetch: bool = False) -> Step:
    model = task.case.build()
    blocks = task.case.blocks(model)
    shard(LIBRARIES[library], model, blocks, task.mesh, bf16=task.bf16)
    if prefetch:
        prefetch_explicitly(blocks)
        model._set_unshard_async_op(True)  # otherwise FSDP2 waits for each all-gather on a CPU
    return task.step(model, local=task.local and library == "ours")


def by_fsdp1(task: Task) -> Step:
    model = task.case.build()
    return task.step(
        torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in task.case.blocks(model)}),
            mixed_precision=torch_fsdp.MixedPrecision(torch.bfloat16, torch.float32) if task.bf16 else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    )


def by_deepspeed(task: Task) -> Step:
    """Train with ZeRO stage 3 and torch's optimizer, which must be allowed in DeepSpeed's options."""
    import deepspeed

    model = task.case.build()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=OPTIMIZERS[task.optimizer](model.parameters(), lr=LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": task.bf16},
        },
    )

    def run(batch: torch.Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    return run


def by_simple_fsdp(task: Task) -> Step:
    """Train with SimpleFSDP of torchtitan, whose parameters gather themselves when they are read."""
    from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if task.bf16 else None
    return task.step(data_parallel(task.case.build(), task.mesh, mode="fully_shard", mp_policy=precision))


TRAINERS: dict[str, Callable[[Task], Step]] = {
    OURS: lambda task: by_fully_shard(task, "ours"),
    FSDP2: lambda task: by_fully_shard(task, "fsdp2"),
    FSDP2_PREFETCH: lambda task: by_fully_shard(task, "fsdp2", prefetch=True),
    "fsdp1": by_fsdp1,
    "ddp": lambda task: task.step(nn.parallel.DistributedDataParallel(task.unsharded())),
    "deepspeed": by_deepspeed,
    "simple fsdp": by_simple_fsdp,
    "none": lambda task: task.step(task.unsharded()),
}

NEEDS = {"deepspeed": "deepspeed", "simple fsdp": "torchtitan.experiments.graph_trainer.simple_fsdp"}


def absent(name: str) -> str | None:
    """Return the reason why the variant cannot run here, or None."""
    try:
        importlib.import_module(NEEDS.get(name, "torch"))
    except ImportError as error:
        return str(error)
    return None
