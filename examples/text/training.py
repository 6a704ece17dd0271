"""Optimizer steps and validation, the same for a sharded model and for its unsharded reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .data import Batch, Text
from .model import mean_loss
from .options import Options
from .sharding import reshard_all

WARM_UP_STEPS = 10
LARGEST_GRADIENT_NORM = 1.0
REPORT_EVERY = 10


@dataclass(slots=True)
class History:
    """Records the loss (nats per byte, mean over ranks) and the gradient norm before clipping of steps from ``start``.

    Steps are recorded as tensors, and ``settle`` converts them to numbers from time to time: reading a number after
    each step would make the host wait for the accelerator.
    """

    start: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    _pending: list[Tensor] = field(default_factory=list)

    def record(self, loss: Tensor, norm: Tensor) -> None:
        self._pending.append(torch.stack((loss.detach().double(), norm.double().to(loss.device))))

    def settle(self, world_size: int) -> None:
        """Average the recorded values over ``world_size`` ranks. All ranks must call it after the same step."""
        if not self._pending:
            return
        sums = torch.stack(self._pending)
        self._pending.clear()
        if world_size > 1:
            dist.all_reduce(sums)
        for loss, norm in (sums / world_size).tolist():
            self.losses.append(loss)
            self.norms.append(norm)

    def settle_alone(self) -> None:
        """Convert the recorded values to numbers without communication."""
        self.settle(world_size=1)


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.AdamW:
    """Return fused AdamW, which needs one dispatch for all DTensors. Call it after sharding."""
    return torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def learning_rate(options: Options, step: int) -> float:
    """Return the learning rate, with a warm-up. It does not depend on ``--steps``, so a run can be extended."""
    return options.lr * min(1.0, (step + 1) / WARM_UP_STEPS)


def is_reported(step: int, steps: range) -> bool:
    """Return whether the loss of a step is shown: every tenth, the first and the last."""
    return (step + 1) % REPORT_EVERY == 0 or step in (steps[0], steps[-1])


def batch_key(options: Options, step: int, rank: int) -> str:
    """Return the key from which the batch of one rank in one step is drawn."""
    return f"train/{options.seed}/{step}/{rank}"


def apply_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> Tensor:
    """Clip the gradients, step and drop them. Returns their norm before clipping as a 0-d tensor."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT_NORM)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model in training on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    options: Options
    device: torch.device

    def step(self, text: Text, step: int, history: History) -> None:
        """Run one optimizer step on this rank's batch. A sharded model averages gradients over the ranks itself."""
        key = batch_key(self.options, step, dist.get_rank())
        batch = text.batch(key, batch=self.options.batch, seq=self.options.seq).to(self.device)
        loss = mean_loss(self.model(batch.inputs), batch.targets)
        loss.backward()
        history.record(loss, apply_gradients(self.model, self.optimizer, learning_rate(self.options, step)))

    def train(
        self,
        text: Text,
        steps: range,
        *,
        on_report: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
        after_step: Callable[[int], None] = lambda done: None,
    ) -> History:
        """Train ``steps``.

        Args:
            steps: the numbers of the steps.
            on_report: a function of a step, its loss, and the seconds per step since the last report.
            after_step: a function of the number of finished steps.
        """
        history = History(start=steps.start)
        busy, unreported = 0.0, 0
        for step in steps:
            began = time.perf_counter()
            self.step(text, step, history)
            due = is_reported(step, steps)
            if due:
                history.settle(dist.get_world_size())
            busy, unreported = busy + time.perf_counter() - began, unreported + 1
            if due:
                on_report(step, history.losses[-1], busy / unreported)
                busy, unreported = 0.0, 0
            after_step(step + 1)
        return history

    def validate(self, text: Text) -> float:
        """Return the loss in nats per byte over fixed batches, averaged over all ranks."""
        self.model.eval()
        losses = [self._loss_of(each) for each in self._validation_batches(text)]
        self.model.train()
        reshard_all(self.model)
        total = torch.stack(losses).double().sum()
        dist.all_reduce(total)
        return total.item() / (len(losses) * dist.get_world_size())

    def _validation_batches(self, text: Text) -> list[Batch]:
        keys = (f"validate/{dist.get_rank()}/{index}" for index in range(self.options.validation_batches))
        return [text.batch(key, batch=self.options.batch, seq=self.options.seq) for key in keys]

    @torch.no_grad()
    def _loss_of(self, batch: Batch) -> Tensor:
        here = batch.to(self.device)
        return mean_loss(self.model(here.inputs), here.targets)
