"""What a training that is interrupted needs besides its model: a position in the data, and who interrupts it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .data import Batch, Text

NOISE = 0.02  # share of the input bytes that training replaces by others


class Reader:
    """This rank's way through the text: its windows in an order drawn anew for every epoch, some bytes replaced.

    Where it is, is ``position``; which bytes it replaces next is the state of torch's random number generator. A
    checkpoint needs both.
    """

    def __init__(self, text: Text, *, seed: int, rank: int, world_size: int, batch: int, seq: int) -> None:
        self.position = 0
        self._text, self._seed, self._batch, self._seq = text, seed, batch, seq
        self._starts = range(rank * seq, len(text.data) - seq, world_size * seq)
        self._epoch, self._order = -1, list(self._starts)

    def next(self) -> Batch:
        """The next windows; the inputs noisy, the targets as they are."""
        windows = torch.stack([self._window(self.position + index) for index in range(self._batch)])
        self.position += self._batch
        inputs = windows[:, :-1].contiguous()
        noisy = torch.where(torch.rand(inputs.shape) < NOISE, torch.randint_like(inputs, 256), inputs)
        return Batch(noisy, windows[:, 1:].contiguous())

    def _window(self, index: int) -> torch.Tensor:
        epoch, place = divmod(index, len(self._starts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._starts)
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        start = self._order[place]
        return self._text.data[start : start + self._seq + 1].long()


@dataclass(frozen=True, slots=True)
class Kill:
    """``rank`` ends within the step ``step``, at ``moment`` of it, a number between 0 and 1."""

    rank: int
    step: int
    moment: float


def planned_kill(seed: int, attempt: int, start: int, every: int, world_size: int) -> Kill | None:
    """What befalls the attempt that begins at step ``start``: some rank after ``every`` steps in the mean, or nobody
    where ``every`` is 0. The same on every rank.
    """
    chance = random.Random(f"kill/{seed}/{attempt}")
    if not every:
        return None
    return Kill(chance.randrange(world_size), start + chance.randint(1, 2 * every - 1), chance.random())


class Killer:
    """Ends this process by SIGKILL as planned, from a thread, so that it can happen anywhere in the step."""

    def __init__(self, kill: Kill | None, rank: int) -> None:
        self._kill = kill if kill is not None and kill.rank == rank else None
        self._began = time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Takes the step to last as long as the one before it."""
        seconds = time.perf_counter() - self._began
        self._began = time.perf_counter()
        if self._kill is not None and step == self._kill.step:
            timer = threading.Timer(self._kill.moment * seconds, self._end, [step])
            timer.daemon = True
            timer.start()

    def _end(self, step: int) -> None:
        assert self._kill is not None
        print(f"rank {self._kill.rank} is killed in step {step + 1}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Journal:
    """The steps that were done, those that are lost included: a line each, which a kill cannot take back."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, step: int) -> None:
        with self._path.open("a") as file:
            file.write(f"{step}\n")

    def steps(self) -> list[int]:
        """In the order in which they were done."""
        return [int(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []
