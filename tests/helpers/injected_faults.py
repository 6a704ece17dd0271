"""Fault injection: an operation of a rank whose label contains a text is delayed, dropped, or kills the process."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.plugins import SUM, Around, Collective, Communicator, ReduceOp, Transfer, Work
from tests._internals import DONE, root_of, state_of

Launch = Callable[[], Work]
Outputs = Sequence[torch.Tensor]
Effect = Callable[[Launch, Outputs], Work]
"""Performs an operation with an effect. ``launch`` launches it, and its results will be in ``outputs``."""


@dataclass(frozen=True)
class Delay:
    """Launches the operation ``seconds`` late."""

    seconds: float

    def __call__(self, launch: Launch, outputs: Outputs) -> Work:
        time.sleep(self.seconds)
        return launch()


class Drop:
    """Skips the operation and continues; the output tensors are unchanged."""

    def __call__(self, launch: Launch, outputs: Outputs) -> Work:
        return DONE


@dataclass(frozen=True)
class Raise:
    """Raises ``error`` in place of the operation."""

    error: BaseException

    def __call__(self, launch: Launch, outputs: Outputs) -> Work:
        raise self.error


@dataclass(frozen=True)
class Kill:
    """Sends ``signal`` to the process."""

    signal: signal.Signals = signal.SIGKILL

    def __call__(self, launch: Launch, outputs: Outputs) -> Work:
        os.kill(os.getpid(), self.signal)
        return launch()


@dataclass(frozen=True)
class Fault:
    """An effect on the ``number``-th operation whose label contains ``label``, on ``rank`` or on every rank."""

    effect: Effect
    label: str = ""
    number: int = 0
    rank: int | None = None


class FaultyCommunicator(Around):
    """Injects faults into the operations of ``base``. Those with the same list of ``labels`` count together."""

    def __init__(self, base: Communicator, faults: Sequence[Fault], labels: list[str] | None = None) -> None:
        self.labels: list[str] = [] if labels is None else labels
        super().__init__(base, id(self.labels))
        own = dist.get_rank() if dist.is_initialized() else base.rank
        self.faults = [fault for fault in faults if fault.rank in (None, own)]

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        label = label or kind.label
        launch: Launch = partial(self.base.launch, kind, transfers, label, op)
        for fault in self.faults:
            if fault.label in label and fault.number == sum(fault.label in earlier for earlier in self.labels):
                launch = partial(fault.effect, launch, [transfer.output for transfer in transfers])
        self.labels.append(label)
        return launch()


@contextmanager
def inject_faults(model: nn.Module, *faults: Fault) -> Iterator[list[str]]:
    """Inject ``faults`` into operations of a sharded root inside the block, and yield the list of their labels."""
    state = state_of(model)
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
