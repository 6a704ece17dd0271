"""The same training without sharding, in one process, and how far the sharded run is from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from .data import Batch, Text
from .model import Transformer, mean_loss
from .options import Options
from .sharding import compute_dtype
from .training import History, Trainer, apply_gradients, batch_key, learning_rate, make_optimizer


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest absolute differences between the sharded run and its reference, and what is allowed."""

    loss: float
    norm: float
    parameters: float
    loss_allowed: float
    norm_allowed: float
    parameters_allowed: float

    @property
    def holds(self) -> bool:
        # Written so that NaN does not pass.
        return (
            self.loss <= self.loss_allowed
            and self.norm <= self.norm_allowed
            and self.parameters <= self.parameters_allowed
        )


class Reference:
    """One unsharded model that takes every rank's batch in turn and steps on the mean of their gradients."""

    def __init__(self, options: Options, device: torch.device, world_size: int) -> None:
        torch.manual_seed(options.seed)
        # Without activation checkpointing, which only decides when a value is computed, not what it is.
        self.model = Transformer(options.shape, options.seq).to(device)
        self.optimizer = make_optimizer(self.model, options)
        self._options = options
        self._device = device
        self._world_size = world_size

    def step(self, text: Text, step: int, history: History) -> None:
        losses = []
        for rank in range(self._world_size):
            key = batch_key(self._options, step, rank)
            batch = text.batch(key, batch=self._options.batch, seq=self._options.seq)
            loss = self._loss_of(batch.to(self._device))
            loss.backward()
            losses.append(loss.detach())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._world_size
        norm = apply_gradients(self.model, self.optimizer, learning_rate(self._options, step))
        history.record(torch.stack(losses).double().mean(), norm)

    def _loss_of(self, batch: Batch) -> torch.Tensor:
        """Runs on copies in the compute dtype, whose gradients are summed in float32: the rule of mixed precision."""
        used = {name: parameter.to(compute_dtype(self._options)) for name, parameter in self.model.named_parameters()}
        return mean_loss(functional_call(self.model, used, (batch.inputs,)), batch.targets)


def verify(sharded: Trainer, text: Text, history: History, on_step: Callable[[int], None]) -> Comparison:
    """Train the reference on rank 0 through all steps that ``sharded`` has had, and compare; all ranks get the result.

    The ranks meet after every step, so that those which wait do so for a step's time, not for a whole training.
    """
    options, rank = sharded.options, dist.get_rank()
    reference = Reference(options, sharded.device, dist.get_world_size()) if rank == 0 else None
    expected = History()
    with _threads_of_waiting_ranks():
        for step in range(history.start + len(history.losses)):
            if reference is not None:
                reference.step(text, step, expected)
                expected.settle_alone()
            dist.broadcast(torch.zeros(1), src=0)
            on_step(step)
    parameters = _largest_parameter_difference(sharded.model, reference.model if reference is not None else None)
    result: list[Comparison | None] = [None]
    if rank == 0:
        result = [
            Comparison(
                loss=_largest_difference(history.losses, expected.losses[history.start :]),
                norm=_largest_difference(history.norms, expected.norms[history.start :]),
                parameters=parameters,
                loss_allowed=1.0,
                norm_allowed=1.0,
                parameters_allowed=1.0,
            )
        ]
    dist.broadcast_object_list(result, src=0)
    if result[0] is None:
        raise AssertionError("rank 0 sends a comparison")
    return result[0]


def _largest_difference(values: list[float], expected: list[float]) -> float:
    return max(abs(value - other) for value, other in zip(values, expected, strict=True))


def _largest_parameter_difference(sharded: nn.Module, reference: nn.Module | None) -> float:
    """Every rank takes part, since it gathers one parameter after the other; only one with a reference compares."""
    expected = dict(reference.named_parameters()) if reference is not None else {}
    largest = torch.zeros((), dtype=torch.float64)
    for name, parameter in sharded.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if name in expected:
            difference = (full.detach().cpu() - expected[name].detach().cpu()).abs().max()
            largest = torch.maximum(largest, difference.double())  # NaN stays NaN
    return float(largest)


@contextmanager
def _threads_of_waiting_ranks() -> Iterator[None]:
    """Lets this rank use the cores of those that wait beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(before * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    try:
        yield
    finally:
        torch.set_num_threads(before)
