"""The position in the data and the random kills of an interrupted training."""

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

NOISE = 0.02  # the share of the input bytes that training replaces by others


class Reader:
    """The windows of this rank, in a different random order in every epoch, with some bytes replaced.

    A checkpoint needs ``position`` and the state of torch's random number generator, which draws the replaced bytes.
    """

    def __init__(self, text: Text, *, seed: int, rank: int, world_size: int, batch: int, seq: int) -> None:
        self.position = 0
        self._text, self._seed, self._batch, self._seq = text, seed, batch, seq
        self._starts = range(rank * seq, len(text.data) - seq, world_size * seq)
        self._epoch, self._order = -1, list(self._starts)

    def next(self) -> Batch:
        """Return the next windows. Inputs are noisy, targets are not."""
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
    """A kill of ``rank`` during step ``step``, at ``moment``, a fraction of the step between 0 and 1."""

    rank: int
    step: int
    moment: float


def planned_kill(seed: int, attempt: int, start: int, every: int, world_size: int) -> Kill | None:
    """Draw the kill of the attempt that begins at step ``start``, the same on every rank.

    A random rank is killed after ``every`` steps on average. If ``every`` is 0, no rank is killed.
    """
    chance = random.Random(f"kill/{seed}/{attempt}")
    if not every:
        return None
    return Kill(chance.randrange(world_size), start + chance.randint(1, 2 * every - 1), chance.random())


class Killer:
    """Kills this process by SIGKILL as planned. It uses a thread, so that the kill may come anywhere in the step."""

    def __init__(self, kill: Kill | None, rank: int) -> None:
        self._kill = kill if kill is not None and kill.rank == rank else None
        self._began = time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Begin a step, which is assumed to take as long as the previous one."""
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
    """A file with one line per finished step, including steps that a kill undid. Lines survive a kill."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, step: int) -> None:
        with self._path.open("a") as file:
            file.write(f"{step}\n")

    def steps(self) -> list[int]:
        """Return the steps in the order in which they were done."""
        return [int(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []
