"""One rank of ``soak.py``: trains in equal rounds, injects the planned faults, and reports events to the driver.

Every round begins with the same parameters and has the same batches, so that each of its checkpoints must be bitwise
identical to that of a round without faults. A failed step is repeated once, and must then succeed.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from soak_faults import KILLED_IN_SAVE, FragileInt8, InjectedError, Planned, emit, inject, kill_soon, planned
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp import CommunicationPolicy, FSDPError, Int8, checkpoint, find_nonfinite, fully_shard

DEPTH, WIDTH, BATCH = 4, 64, 4
ACCUMULATED = 2
"""The number of microbatches of every fourth step. Other steps have one."""
SAVE_SECONDS = 0.05
"""The limit in seconds after the beginning of a save in which a rank is killed."""
GAVE_UP = 3
"""The exit status of a rank that has lost another one."""


@dataclass(frozen=True)
class Settings:
    """The settings that the driver passes to a rank."""

    seed: int
    attempt: int
    ranks: int
    folder: str
    steps: int
    """The number of steps of a round."""
    save_every: int
    fault_every: int
    """The average number of steps between two faults; 0 means no faults."""
    timeout: float
    """The timeout in seconds of the process group over which the model is sharded."""

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @property
    def over(self) -> Path:
        """A file. When it exists, the current round is the last."""
        return Path(self.folder) / "over"


class Layers(nn.Module):
    """Equal layers. Parameters and gradients of one of them are encoded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(mesh: DeviceMesh) -> Any:
    model: Any = Layers()
    codec = FragileInt8(Int8())
    for index, layer in enumerate(model.layers):
        encoded = CommunicationPolicy(all_gather=codec, reduce_scatter=codec, min_numel=1) if index == 1 else None
        fully_shard(layer, mesh=mesh, comm_policy=encoded)
    fully_shard(model, mesh=mesh)
    model.set_schedule(max_fused_bytes=0)
    return model


class Training:
    """A model, AdamW, and their position: ``step`` in the round number ``round``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = dist.get_rank()
        group = dist.new_group(timeout=timedelta(seconds=settings.timeout))
        self.model = build(DeviceMesh.from_group(group, "cpu"))
        self.initial = [_local(p).detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = self.round = self.taken = 0

    def restart(self) -> None:
        self.step, self.round = 0, self.round + 1
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.initial, strict=True):
                _local(parameter).copy_(value)

    def advance(self) -> None:
        """Run one step. The function before the optimizer's step ends only if it ends on all ranks."""
        number = ACCUMULATED if self.step % 4 == 3 else 1
        for microbatch in range(number):
            self.model.set_requires_gradient_sync(microbatch == number - 1)
            self.model(self._batch(microbatch)).square().mean().backward()
        if nonfinite := find_nonfinite(self.model):
            raise ArithmeticError(f"gradients are not finite: {nonfinite}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1

    def _batch(self, microbatch: int) -> torch.Tensor:
        seed = (self.step * ACCUMULATED + microbatch) * self.settings.ranks + self.rank
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))

    def suffer(self, fault: Planned) -> None:
        """Run one step in which ``fault`` happens. If it fails, repeat it without. End the job if necessary."""
        try:
            with inject(self.model, fault):
                self.advance()
        except (InjectedError, FSDPError) as error:
            emit("raises", error=type(error).__name__, text=str(error), problem=self._problem(fault, error))
            if fault.ends_job:
                sys.exit(GAVE_UP)
            self.model.reset_iter_state()
            self.optimizer.zero_grad()
            emit("goes on")
            self.advance()
        else:
            if fault.fails_step:
                raise RuntimeError(f"rank {self.rank} has no report of {fault}")

    def _problem(self, fault: Planned, error: Exception) -> str:
        """Return a description of the mismatch between ``fault`` and ``error``, or an empty text."""
        if not fault.fails_step:
            return "must not fail the step"
        if isinstance(error, InjectedError) != (fault.affects(self.rank) and not fault.seconds):
            return "another rank's exception"
        if fault.rank is not None and fault.rank != self.rank and f"rank {fault.rank}" not in str(error):
            return "does not name the rank"
        return ""

    def save(self, fault: Planned | None) -> None:
        if fault is not None and fault.affects(self.rank):
            kill_soon(SAVE_SECONDS, fault.index)
        where = {"round": self.round, "step": self.round * self.settings.steps + self.step}
        try:
            checkpoint.save(
                Path(self.settings.folder) / "checkpoints",
                self.model,
                self.optimizer,
                where,
                keep_last=2,
                timeout=self.settings.timeout,
            )
            if fault is not None:
                time.sleep(SAVE_SECONDS)  # the save may finish first
                self.advance()
        except FSDPError as error:
            problem = "" if fault is not None else "nothing was to happen"
            emit("raises", error=type(error).__name__, text=str(error), problem=problem)
            sys.exit(GAVE_UP)
        gc.collect()
        emit("saved", step=self.step, steps=self.taken, digest=self.digest(), **used())

    def load(self, path: Path) -> None:
        where = checkpoint.load(path, self.model, self.optimizer)
        self.round = where["round"]
        self.step = where["step"] - self.round * self.settings.steps

    def digest(self) -> str:
        """Return a digest of the bits of this rank's parameters and optimizer state."""
        found = hashlib.sha1()
        for parameter in self.model.parameters():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                found.update(_local(tensor).detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def used() -> dict[str, int]:
    """Return the resident bytes of this process, its open files and its threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def train(settings: Settings) -> None:
    """Run rounds from the newest checkpoint until the file that ends the job exists."""
    training = Training(settings)
    newest = checkpoint.latest(Path(settings.folder) / "checkpoints")
    if newest is not None:
        training.load(newest)
    emit("begins", round=training.round, step=training.step)
    faults = planned(settings.seed, settings.attempt, settings.ranks, settings.fault_every or 1, settings.timeout)
    gap, fault = next(faults)
    left = gap if settings.fault_every else -1
    while True:
        while training.step < settings.steps:
            left -= 1
            in_save = None
            if left == 0:
                emit("fault", name=fault.name, ends_job=fault.ends_job, seconds=fault.seconds)
                training.suffer(fault)
                in_save = fault if fault.kind == KILLED_IN_SAVE else None
                left, fault = next(faults)
            else:
                training.advance()
            training.step += 1
            if training.step % settings.save_every == 0 or training.step == settings.steps or in_save is not None:
                training.save(in_save)
        if is_over(settings):
            return
        training.restart()


def is_over(settings: Settings) -> bool:
    """Return the result of rank 0 on all ranks."""
    found = torch.tensor([settings.over.exists()])
    dist.broadcast(found, 0)
    return bool(found.item())


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()  # ranks that import torch must not count as late
    train(settings)
    emit("ends")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
