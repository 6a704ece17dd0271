"""Ways to train one model on all ranks: the libraries that ``step_time.py`` compares, each with its own conventions."""

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

__all__ = ["FSDP2", "FSDP2_PREFETCH", "OPTIMIZERS", "OURS", "TRAINERS", "Job", "absent"]

OURS, FSDP2, FSDP2_PREFETCH = "ours", "fsdp2", "fsdp2 prefetch"
LEARNING_RATE = 1e-4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
}

Step = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    case: Case
    mesh: DeviceMesh
    bf16: bool
    optimizer: str
    local: bool

    def step(self, model: nn.Module, *, local: bool = False) -> Step:
        """Forward, backward and an update of ``model``, whose output is the loss."""
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


def by_fully_shard(job: Job, library: str, *, prefetch: bool = False) -> Step:
    model = job.case.build()
    blocks = job.case.blocks(model)
    shard(LIBRARIES[library], model, blocks, job.mesh, bf16=job.bf16)
    if prefetch:
        prefetch_explicitly(blocks)
        model._set_unshard_async_op(True)  # without it, FSDP2 waits for each all-gather on a CPU
    return job.step(model, local=job.local and library == "ours")


def by_fsdp1(job: Job) -> Step:
    model = job.case.build()
    return job.step(
        torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in job.case.blocks(model)}),
            mixed_precision=torch_fsdp.MixedPrecision(torch.bfloat16, torch.float32) if job.bf16 else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    )


def by_deepspeed(job: Job) -> Step:
    """ZeRO stage 3 with torch's optimizer, which DeepSpeed must be told to allow."""
    import deepspeed

    model = job.case.build()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=OPTIMIZERS[job.optimizer](model.parameters(), lr=LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": job.bf16},
        },
    )

    def run(batch: torch.Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    return run


def by_simple_fsdp(job: Job) -> Step:
    """SimpleFSDP of torchtitan: parameters that gather themselves when they are read."""
    from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if job.bf16 else None
    return job.step(data_parallel(job.case.build(), job.mesh, mode="fully_shard", mp_policy=precision))


TRAINERS: dict[str, Callable[[Job], Step]] = {
    OURS: lambda job: by_fully_shard(job, "ours"),
    FSDP2: lambda job: by_fully_shard(job, "fsdp2"),
    FSDP2_PREFETCH: lambda job: by_fully_shard(job, "fsdp2", prefetch=True),
    "fsdp1": by_fsdp1,
    "ddp": lambda job: job.step(nn.parallel.DistributedDataParallel(job.unsharded())),
    "deepspeed": by_deepspeed,
    "simple fsdp": by_simple_fsdp,
    "none": lambda job: job.step(job.unsharded()),
}

NEEDS = {"deepspeed": "deepspeed", "simple fsdp": "torchtitan.experiments.graph_trainer.simple_fsdp"}


def absent(name: str) -> str | None:
    """Why the variant cannot run here; None if it can."""
    try:
        importlib.import_module(NEEDS.get(name, "torch"))
    except ImportError as error:
        return str(error)
    return None
