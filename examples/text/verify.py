"""Trains without sharding in one process, and compares two trainings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from .data import Batch, Text
from .model import Transformer, mean_loss
from .options import Options
from .sharding import compute_dtype
from .training import History, Trainer, apply_gradients, batch_key, learning_rate, make_optimizer


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences of two trainings: absolute for losses (nats per byte) and parameters, relative for gradient norms."""

    loss: float
    norm: float
    parameter: float

    def within(self, allowed: Differences) -> bool:
        """Return whether no difference exceeds its limit. NaN exceeds any limit."""
        return self.loss <= allowed.loss and self.norm <= allowed.norm and self.parameter <= allowed.parameter


def allowed_differences(options: Options) -> Differences:
    """Return the differences that rounding alone may cause.

    AdamW divides a gradient by its own size, so that a weight moves by about the learning rate in every step, even if
    its gradient is small. So a wrong gradient in one step leaves a difference of about one learning rate, and a tenth
    of that distinguishes it from rounding. AdamW hides gradients that are wrong by a factor. The gradient norm before
    clipping detects those; its difference is relative.

    The tolerances were measured with a reference whose initial weights were changed by half a rounding, over 160 steps
    at the default learning rate. In float32, the loss differed by 6e-6 and parameters by 8e-6 (a 37th of the learning
    rate). In bfloat16, a weight that crosses a rounding boundary changes by 2**-8, so gradients differ in their third
    digit, and gradients near zero in sign, which AdamW turns into steps of the learning rate: the loss differed by 4e-4
    and parameters by 2e-4 (0.6 of the learning rate).

    Training amplifies differences, slowly at the default learning rate. At three times this rate (1e-3) it is chaotic:
    the same experiment ended with a loss difference of 5e-2, so no tolerance can detect errors there.
    """
    if options.bf16:
        return Differences(loss=1e-2, norm=5e-2, parameter=2 * options.lr)
    return Differences(loss=1e-4, norm=1e-3, parameter=options.lr / 10)


class Reference:
    """An unsharded model that computes every rank's batch in turn and steps on the mean of the gradients."""

    def __init__(self, options: Options, device: torch.device, world_size: int) -> None:
        torch.manual_seed(options.seed)
        # Without activation checkpointing, which does not change values.
        self.model = Transformer(options.shape, options.seq).to(device)
        self._optimizer = make_optimizer(self.model, options)
        self._options = options
        self._device = device
        self._world_size = world_size

    def step(self, text: Text, step: int, history: History) -> None:
        """Run one optimizer step, recorded as in the sharded run."""
        losses = [self._accumulate(text, step, rank) for rank in range(self._world_size)]
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._world_size
        norm = apply_gradients(self.model, self._optimizer, learning_rate(self._options, step))
        history.record(torch.stack(losses).double().mean(), norm)

    def _accumulate(self, text: Text, step: int, rank: int) -> Tensor:
        key = batch_key(self._options, step, rank)
        loss = self._loss_of(text.batch(key, batch=self._options.batch, seq=self._options.seq).to(self._device))
        loss.backward()
        return loss.detach()

    def _loss_of(self, batch: Batch) -> Tensor:
        """Compute with copies in the compute dtype, whose gradients are summed in float32, as in mixed precision."""
        used = {name: parameter.to(compute_dtype(self._options)) for name, parameter in self.model.named_parameters()}
        return mean_loss(functional_call(self.model, used, (batch.inputs,)), batch.targets)


def compare_with_reference(
    sharded: Trainer, history: History, text: Text, on_step: Callable[[int, float], None]
) -> Differences:
    """Train a reference on rank 0 for all steps of ``sharded``, and return the differences on every rank.

    All ranks synchronize after every step, so that none waits for longer than a step. ``on_step`` is called with each
    step and its loss.
    """
    options, world_size, is_first = sharded.options, dist.get_world_size(), dist.get_rank() == 0
    reference = Reference(options, sharded.device, world_size) if is_first else None
    expected = History()
    with _threads_of_waiting_ranks():
        for step in range(history.start + len(history.losses)):
            if reference is not None:
                reference.step(text, step, expected)
                expected.settle_alone()
            on_step(step, _from_rank_0(expected.losses[-1] if is_first else 0.0))
    parameter = _largest_parameter_difference(sharded.model, reference.model if reference is not None else None)
    loss, norm = _history_differences(history, expected) if is_first else (0.0, 0.0)
    return Differences(_from_rank_0(loss), _from_rank_0(norm), _from_rank_0(parameter))


def compare_runs(model: nn.Module, history: History, other: nn.Module, again: History) -> Differences:
    """Return the differences between two sharded trainings over the steps of ``again``, the same on every rank."""
    loss, norm = _history_differences(history, again)
    apart = max(
        _largest(one.to_local() - two.to_local())
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
        if isinstance(one, DTensor) and isinstance(two, DTensor)
    )
    largest = torch.tensor(apart)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return Differences(loss, norm, largest.item())


def _history_differences(history: History, other: History) -> tuple[float, float]:
    """Return the largest absolute difference of losses and relative difference of norms, over common steps."""
    start = max(history.start, other.start)
    losses = _aligned(history.losses[start - history.start :], other.losses[start - other.start :])
    norms = _aligned(history.norms[start - history.start :], other.norms[start - other.start :])
    loss = (losses[0] - losses[1]).abs().max()
    norm = ((norms[0] - norms[1]).abs() / norms[1]).max()
    return loss.item(), norm.item()


def _aligned(values: Sequence[float], others: Sequence[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(values, dtype=torch.float64), torch.tensor(others, dtype=torch.float64)


def _largest_parameter_difference(sharded: nn.Module, reference: nn.Module | None) -> float:
    """Compare the parameters. All ranks take part, because parameters are gathered one by one."""
    expected = dict(reference.named_parameters()) if reference is not None else {}
    largest = 0.0
    for name, parameter in sharded.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if name in expected:
            largest = max(largest, _largest(full - expected[name].to(full.device)))
    return largest


def _largest(difference: Tensor) -> float:
    """Return the largest magnitude, or infinity for NaN, which a comparison would ignore."""
    magnitudes = difference.detach().abs().nan_to_num(nan=float("inf"))
    return magnitudes.max().item() if magnitudes.numel() else 0.0


def _from_rank_0(value: float) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(number, src=0)
    return number.item()


@contextmanager
def _threads_of_waiting_ranks() -> Iterator[None]:
    """Let this rank use the cores of waiting ranks, if its threads do not spin while they wait.

    By default the threads of OpenMP spin: on two cores with other load, steps with two threads took 5 to 10 times as
    long as with one. With OMP_WAIT_POLICY=passive they took as long as with one, and half as long on idle cores.
    """
    before = torch.get_num_threads()
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        torch.set_num_threads(before * int(os.environ["LOCAL_WORLD_SIZE"]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
