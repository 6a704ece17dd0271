"""The faults of ``soak.py``: draws them from a seed that all ranks have, and injects them into a rank."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import Int8
from composable_fsdp._core import memory as storage
from composable_fsdp._core.memory import Work
from tests.helpers.injected_faults import Fault, Raise, inject_faults

__all__ = [
    "KILLED_IN_SAVE",
    "FragileInt8",
    "InjectedError",
    "Planned",
    "emit",
    "inject",
    "kill_soon",
    "planned",
]

RAISING = ("forward", "forward hook", "backward", "gradient hook", "encode", "decode", "allocation", "operation")
KILLED, KILLED_IN_SAVE = "killed", "killed while saving"
SHORT, LONG, TOO_LONG = "stall", "stall beyond patience", "stall beyond timeout"
WEIGHTS = dict.fromkeys(RAISING, 9) | {KILLED: 2, KILLED_IN_SAVE: 1, SHORT: 8, LONG: 8, TOO_LONG: 2}
STALLS = {SHORT: (0.1, 0.8), LONG: (1.5, 4.0)}
"""The timeout in seconds. A rank requests the reports of others after one second."""
BEYOND_TIMEOUT = (3.0, 4.5)
"""The seconds by which a stall exceeds the timeout of the process group.

After the timeout, other ranks collect reports for up to two seconds, and then wait again as long for the rank.
"""
ONE_RANK_SHARE = 0.5
"""The share of exceptions that only one rank raises."""
OPERATIONS, ALLOCATIONS = 8, 2
"""The smallest number of such calls in every step on every transport."""


class InjectedError(ArithmeticError):
    """An injected exception."""


@dataclass(frozen=True)
class Planned:
    """A fault of one step.

    Attributes:
        kind: a key of ``WEIGHTS``.
        rank: the rank with the fault, or None for all ranks.
        index: the number of the layer, operation or allocation, modulo their number.
        seconds: the duration of a stall.
        sleeps: if true, the rank sleeps during a stall and its other threads run. Otherwise its process is stopped.
    """

    kind: str
    rank: int | None
    index: int
    seconds: float = 0.0
    sleeps: bool = False

    @property
    def name(self) -> str:
        who = "" if self.kind not in RAISING else ", on all ranks" if self.rank is None else ", on one rank"
        return self.kind + who

    @property
    def ends_job(self) -> bool:
        return self.kind in (KILLED, KILLED_IN_SAVE)

    @property
    def fails_step(self) -> bool:
        """Return whether every rank must raise."""
        return self.kind not in (SHORT, LONG, KILLED_IN_SAVE)

    def affects(self, rank: int) -> bool:
        return self.rank in (None, rank)


def planned(seed: int, attempt: int, ranks: int, every: int, timeout: float) -> Iterator[tuple[int, Planned]]:
    """Yield faults, each with the number of steps until it happens, on average ``every``. Never ends."""
    draw = random.Random(f"soak/{seed}/{attempt}")
    while True:
        (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        rank = None if kind in RAISING and draw.random() > ONE_RANK_SHARE else draw.randrange(ranks)
        low, high = STALLS.get(kind, [timeout + more for more in BEYOND_TIMEOUT])
        seconds = draw.uniform(low, high) if "stall" in kind else 0.0
        yield draw.randint(1, 2 * every - 1), Planned(kind, rank, draw.randrange(100), seconds, draw.random() < 0.5)


def emit(event: str, **values: object) -> None:
    """Write one line for the driver, which remains if the process is killed right afterwards."""
    os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **values}) + "\n").encode())


def kill_soon(longest: float, moment: int) -> None:
    """End this process within ``longest`` seconds. ``moment``, from 0 to 99, chooses the time."""
    timer = threading.Timer(longest * moment / 100, _die)
    timer.daemon = True
    timer.start()


def _die() -> None:
    emit("happens")
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class FragileInt8:
    """An ``Int8`` whose methods can be made to raise."""

    codec: Int8

    def payload_bytes(self, numel: int) -> int:
        return self.codec.payload_bytes(numel)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self.codec.encode(rows)

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return self.codec.decode(payload, numel)


# -- injection, as a context around a step


def inject(model: Any, fault: Planned) -> AbstractContextManager[object]:
    """Return a context in which ``fault`` happens to a rank. All ranks call it; ``model`` has ``layers``."""
    layer, turn = model.layers[fault.index % len(model.layers)], fault.index // len(model.layers) % 2
    is_affected = fault.affects(dist.get_rank())
    if fault.kind in (KILLED, SHORT, LONG, TOO_LONG, "operation"):
        effect = {KILLED: _killed, "operation": Raise(InjectedError("on the wire"))}.get(fault.kind, _Stalled(fault))
        return inject_faults(model, Fault(_emits(effect), number=fault.index % OPERATIONS, rank=fault.rank))
    if not is_affected or fault.kind == KILLED_IN_SAVE:
        return ExitStack()
    if fault.kind == "allocation":
        return _raising_at(storage.OwnedBuffer, "allocate", fault.index % ALLOCATIONS)
    if fault.kind in ("encode", "decode"):
        return _raising_at(FragileInt8, fault.kind, turn)
    return _hooked(layer, fault.kind)


@contextmanager
def _raising_at(owner: object, name: str, number: int) -> Iterator[None]:
    """Raise in call number ``number``, from 0, of the function ``name``."""
    original, calls = getattr(owner, name), iter(range(1 << 30))

    def function(*args: Any) -> Any:
        if next(calls) == number:
            _fail()
        return original(*args)

    with mock.patch.object(owner, name, function):
        yield


@contextmanager
def _hooked(layer: nn.Module, kind: str) -> Iterator[None]:
    with ExitStack() as stack:
        if kind == "forward":
            handles = [layer.register_forward_pre_hook(_fail)]
        elif kind == "forward hook":
            handles = [layer.register_forward_hook(_fail)]
        elif kind == "backward":
            handles = [layer.register_forward_hook(lambda module, args, output: output.register_hook(_fail) and None)]
        else:
            handles = [p.register_post_accumulate_grad_hook(_fail) for p in layer.parameters()]
        for handle in handles:
            stack.callback(handle.remove)
        yield


def _fail(*_: object) -> None:
    emit("happens")
    raise InjectedError("on purpose")


Launch = Callable[[], Work]


def _emits(
    effect: Callable[[Launch, Sequence[torch.Tensor]], Work],
) -> Callable[[Launch, Sequence[torch.Tensor]], Work]:
    def run(launch: Launch, outputs: Sequence[torch.Tensor]) -> Work:
        emit("happens")
        return effect(launch, outputs)

    return run


def _killed(launch: Launch, outputs: Sequence[torch.Tensor]) -> Work:
    os.kill(os.getpid(), signal.SIGKILL)
    return launch()


@dataclass(frozen=True)
class _Stalled:
    """Sleep, or stop until the driver, which is notified, continues the process."""

    fault: Planned

    def __call__(self, launch: Launch, outputs: Sequence[torch.Tensor]) -> Work:
        if self.fault.sleeps:
            time.sleep(self.fault.seconds)
        else:
            emit("stops", seconds=self.fault.seconds)
            os.kill(os.getpid(), signal.SIGSTOP)
        return launch()
