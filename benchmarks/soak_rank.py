"""One rank of ``soak.py``: trains in rounds that are all alike, suffers the planned faults, and tells what it sees.

A round begins with the same parameters and has the same batches as every other one, so that each checkpoint of it must
have the bits that the same one of an undisturbed round has. A step that failed is tried once more, and then must work.
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
from soak_faults import KILLED_IN_SAVE, Accident, FragileInt8, Planned, inflict, kill_soon, planned, tell
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp import CommunicationPolicy, FSDPError, Int8, checkpoint, find_nonfinite, fully_shard

DEPTH, WIDTH, BATCH = 4, 64, 4
ACCUMULATED = 2
"""Microbatches of every fourth step; the others have one."""
SAVE_SECONDS = 0.05
"""Within which of the beginning of a save a rank is killed."""
GAVE_UP = 3
"""Exit status of a rank that has lost another one."""


@dataclass(frozen=True)
class Settings:
    """What the driver hands to a rank."""

    seed: int
    attempt: int
    ranks: int
    folder: str
    steps: int
    """Of a round."""
    save_every: int
    fault_every: int
    """Steps from a fault to the next in the mean; 0: none."""
    timeout: float
    """Seconds, of the process group over which the model is sharded."""

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @property
    def over(self) -> Path:
        """A file: once it is there, the round is the last."""
        return Path(self.folder) / "over"


class Layers(nn.Module):
    """Equal layers, the gradients and parameters of one of which travel encoded."""

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
    model.set_max_fused_bytes(0)
    return model


class Training:
    """A model, AdamW, and where they are: ``step`` in the round number ``round``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = dist.get_rank()
        group = dist.new_group(timeout=timedelta(seconds=settings.timeout))
        self.model = build(DeviceMesh.from_group(group, "cpu"))
        self.initial = [_local(p).detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = self.round = self.taken = 0

    def begin_anew(self) -> None:
        self.step, self.round = 0, self.round + 1
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.initial, strict=True):
                _local(parameter).copy_(value)

    def advance(self) -> None:
        """One step, all of it or none: what comes before the optimizer's step ends only if it does on all ranks."""
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
        """One step, in which ``fault`` happens; if that makes it fail, once more without. Ends the job if it must."""
        try:
            with inflict(self.model, fault):
                self.advance()
        except (Accident, FSDPError) as error:
            tell("raises", error=type(error).__name__, text=str(error), problem=self._problem(fault, error))
            if fault.ends_job:
                sys.exit(GAVE_UP)
            self.model.reset_iter_state()
            self.optimizer.zero_grad()
            tell("goes on")
            self.advance()
        else:
            if fault.fails_step:
                raise RuntimeError(f"nobody told rank {self.rank} of {fault}")

    def _problem(self, fault: Planned, error: Exception) -> str:
        """What is wrong with being told of ``fault`` by ``error``, in words; empty if nothing is."""
        if not fault.fails_step:
            return "must not fail the step"
        if isinstance(error, Accident) != (fault.befalls(self.rank) and not fault.seconds):
            return "another rank's exception"
        if fault.rank is not None and fault.rank != self.rank and f"rank {fault.rank}" not in str(error):
            return "does not name the rank"
        return ""

    def save(self, fault: Planned | None) -> None:
        if fault is not None and fault.befalls(self.rank):
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
                progress=False,
            )
            if fault is not None:
                time.sleep(SAVE_SECONDS)  # the save may be the quicker one
                self.advance()
        except FSDPError as error:
            problem = "" if fault is not None else "nothing was to happen"
            tell("raises", error=type(error).__name__, text=str(error), problem=problem)
            sys.exit(GAVE_UP)
        gc.collect()
        tell("saved", step=self.step, steps=self.taken, digest=self.digest(), **used())

    def load(self, path: Path) -> None:
        where = checkpoint.load(path, self.model, self.optimizer, progress=False)
        self.round = where["round"]
        self.step = where["step"] - self.round * self.settings.steps

    def digest(self) -> str:
        """Of this rank's bits of parameters and optimizer state."""
        found = hashlib.sha1()
        for parameter in self.model.parameters():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                found.update(_local(tensor).detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def used() -> dict[str, int]:
    """Resident bytes of this process, its open files and its threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def train(settings: Settings) -> None:
    """Rounds, from the newest checkpoint on, until there is the file that says that it is over."""
    training = Training(settings)
    newest = checkpoint.latest(Path(settings.folder) / "checkpoints")
    if newest is not None:
        training.load(newest)
    tell("begins", round=training.round, step=training.step)
    faults = planned(settings.seed, settings.attempt, settings.ranks, settings.fault_every or 1, settings.timeout)
    gap, fault = next(faults)
    left = gap if settings.fault_every else -1
    while True:
        while training.step < settings.steps:
            left -= 1
            in_save = None
            if left == 0:
                tell("fault", name=fault.name, ends_job=fault.ends_job, seconds=fault.seconds)
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
        training.begin_anew()


def is_over(settings: Settings) -> bool:
    """What rank 0 finds, on all ranks."""
    found = torch.tensor([settings.over.exists()])
    dist.broadcast(found, 0)
    return bool(found.item())


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()  # ranks that import torch are not late
    train(settings)
    tell("ends")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
