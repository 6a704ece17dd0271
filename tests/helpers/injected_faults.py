"""Fault injection: an operation of one rank is delayed, dropped, or ends the process.

A :class:`Fault` has an effect and a time: the n-th operation of a rank whose label contains a text. Labels are the
names of operations in errors, such as ``"all-gather of layers.2 in forward"`` or ``"reduce-scatter of layers.2"``;
:func:`inject_faults` yields those of a model.

    with inject_faults(model, Fault(Kill(), label="all-gather of layers.2 in backward", rank=1)):
        model(batch).sum().backward()
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plugins import SUM, Around, Collective, Communicator, ReduceOp, Transfer, Work
from tests._internals import DONE, find_state, root_of


class Effect(Protocol):
    """Changes what an operation does."""

    def __call__(self, launch: Callable[[], Work], outputs: Sequence[torch.Tensor]) -> Work:
        """Perform the operation with the effect. ``launch`` launches it, and its results will be in ``outputs``."""
        ...


@dataclass(frozen=True, slots=True)
class Delay:
    """Launches the operation ``seconds`` late."""

    seconds: float

    def __call__(self, launch: Callable[[], Work], outputs: Sequence[torch.Tensor]) -> Work:
        time.sleep(self.seconds)
        return launch()


@dataclass(frozen=True, slots=True)
class Drop:
    """Skips the operation and continues; the output tensors are unchanged."""

    def __call__(self, launch: Callable[[], Work], outputs: Sequence[torch.Tensor]) -> Work:
        return DONE


@dataclass(frozen=True, slots=True)
class Raise:
    """Raises ``error`` in place of the operation."""

    error: BaseException

    def __call__(self, launch: Callable[[], Work], outputs: Sequence[torch.Tensor]) -> Work:
        raise self.error


@dataclass(frozen=True, slots=True)
class Kill:
    """Sends ``signal`` to the process: ``SIGKILL`` ends it without output, ``SIGSTOP`` stops it until ``SIGCONT``."""

    signal: signal.Signals = signal.SIGKILL

    def __call__(self, launch: Callable[[], Work], outputs: Sequence[torch.Tensor]) -> Work:
        os.kill(os.getpid(), self.signal)
        return launch()


@dataclass(frozen=True, slots=True)
class Fault:
    """One effect on one operation.

    Args:
        effect: :class:`Delay`, :class:`Drop`, :class:`Raise`, :class:`Kill`, or your own callable.
        label: a text; only operations whose labels contain it are counted.
        number: the index of the operation among these, from 0.
        rank: the global rank on which it happens; every rank by default.
    """

    effect: Effect
    label: str = ""
    number: int = 0
    rank: int | None = None


class FaultyCommunicator(Around):
    """A communicator that forwards to ``base`` and injects faults.

    It counts operations over its whole life, so each fault happens once. Communicators with the same ``labels`` list
    count together.

    Args:
        base: any communicator.
        faults: the faults of all ranks; those of other ranks are ignored.
        labels: the list to append the label of every operation to.
    """

    def __init__(self, base: Communicator, faults: Sequence[Fault], labels: list[str] | None = None) -> None:
        self.labels: list[str] = [] if labels is None else labels
        super().__init__(base, id(self.labels))
        own = dist.get_rank() if dist.is_initialized() else base.rank
        self.faults = [fault for fault in faults if fault.rank in (None, own)]

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        label = label or kind.label
        launch: Callable[[], Work] = partial(self.base.launch, kind, transfers, label, op)
        for fault in self.faults:
            if fault.label in label and fault.number == sum(fault.label in earlier for earlier in self.labels):
                launch = partial(fault.effect, launch, [transfer.output for transfer in transfers])
        self.labels.append(label)
        return launch()


@contextmanager
def inject_faults(model: nn.Module, *faults: Fault) -> Iterator[list[str]]:
    """Inject ``faults`` into operations of a sharded model inside the block.

    Yields the labels of the operations launched on this rank so far: one list for all communicators of the model.

    Args:
        model: the root module. Call this on every rank, between steps: as always, ranks must agree on operations.

    Raises:
        ConfigurationError: ``model`` is not sharded.
    """
    state = find_state(model)
    if state is None:
        raise ConfigurationError(f"inject_faults: {type(model).__name__} is not sharded. Call fully_shard on it first.")
    process_groups = [pgs for each in root_of(state).states.values() for pgs in each.group.process_groups]
    before = [(pgs.axes, pgs.gather, pgs.scatter, pgs.exchange) for pgs in process_groups]
    labels: list[str] = []

    def faulty(communicator: Communicator) -> Communicator:
        return FaultyCommunicator(communicator, faults, labels) if communicator.size > 1 else communicator

    for pgs in process_groups:
        pgs.axes = dataclasses.replace(pgs.axes, replicate=faulty(pgs.axes.replicate))
        pgs.gather, pgs.scatter, pgs.exchange = map(faulty, (pgs.gather, pgs.scatter, pgs.exchange))
    try:
        yield labels
    finally:
        for pgs, original in zip(process_groups, before, strict=True):
            pgs.axes, pgs.gather, pgs.scatter, pgs.exchange = original
