"""Meters of training: speed, MFU, memory and exposed communication."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp._core.hooks import root_of, states_of
from composable_fsdp.errors import ConfigurationError

_FLOPS_PER_PARAMETER = 6
"""FLOPs of forward and backward per token and parameter of a transformer, without attention (Kaplan et al., 2020)."""


_TEXTS: Mapping[str, Callable[[float], str]] = {
    "seconds_per_step": lambda value: "",
    "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
    "memory_bytes": lambda value: f"{value / 2**20:,.0f} MiB",
    "mfu": lambda value: f"{value:.1%} MFU",
    "exposed_share": lambda value: f"{value:.1%} exposed",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The meters and the values of a program when ``step`` steps are done. ``str()`` is a line for a log.

    Attributes:
        step: the number of steps done.
        scalars: the values that the program gave, such as ``loss``, and the meters since the last reading:
            ``seconds_per_step``; ``tokens_per_second`` of all ranks; ``memory_bytes``, on an accelerator the most that
            torch had allocated, on CPU the resident memory now; with ``peak_flops``, ``mfu``, the share of it that
            the model's FLOPs are; where waits block the host, ``exposed_share``, their share of the time.
    """

    step: int
    scalars: Mapping[str, float]

    def __str__(self) -> str:
        texts = [_TEXTS[n](value) if n in _TEXTS else f"{n} {value:.3f}" for n, value in self.scalars.items()]
        return "  ".join(filter(None, texts))


class Meter:
    """Measures training steps on this rank. Call it after each optimizer step, and print or log what it returns.

    Args:
        model: the root of the sharded modules.
        tokens: the tokens, or samples, of one step on all ranks.
        every: the steps from one reading to the next.
        peak_flops: the FLOP/s of one device in the dtype of the computation, for the MFU.
        flops_per_token: the FLOPs of forward and backward per token. The default is six per parameter.

    Raises:
        ConfigurationError: no module of ``model`` is sharded, or a number is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: float,
        *,
        every: int = 1,
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        for name, value in (("tokens", tokens), ("every", every), ("peak_flops", peak_flops)):
            if value is not None and not value > 0:
                raise ConfigurationError(f"Meter: {name} must be a positive number, not {value!r}.")
        self._root = states_of(model)[0][1]
        self._device = next(model.parameters()).device
        self._tokens, self._every, self._peak_flops = tokens, every, peak_flops
        self._flops = flops_per_token or _FLOPS_PER_PARAMETER * sum(p.numel() for p in model.parameters())
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.start(0)

    def __call__(self, step: int, **values: Any) -> Reading | None:
        """Read the meters if ``every`` steps were done since the last reading.

        Args:
            step: the number of steps done.
            values: numbers to report, such as ``loss=loss``. Tensors are read, which waits for them, only if needed.
        """
        return self.read(step, **values) if step - self._step >= self._every else None

    def read(self, step: int, **values: Any) -> Reading:
        """Read the meters of the steps since the last reading."""
        now, waited = time.perf_counter(), self._seconds_waited()
        total, steps = max(now - self._began, 1e-9), max(step - self._step, 1)
        speed = self._tokens * steps / total
        scalars = {n: float(v.detach() if isinstance(v, torch.Tensor) else v) for n, v in values.items()}
        scalars |= {"seconds_per_step": total / steps, "tokens_per_second": speed}
        scalars["memory_bytes"] = float(_memory_in_use(self._device))
        if self._peak_flops is not None:
            scalars["mfu"] = self._flops * speed / (self._peak_flops * self._ranks)
        if waited is not None:
            scalars["exposed_share"] = (waited - self._waited) / total
        self.start(step)
        return Reading(step, scalars)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not measure what runs inside, such as a validation or a checkpoint."""
        began, waited = time.perf_counter(), self._seconds_waited() or 0.0
        yield
        self._began += time.perf_counter() - began
        self._waited += (self._seconds_waited() or 0.0) - waited

    def start(self, step: int) -> None:
        """Measure from now on, when ``step`` steps are done, as after loading a checkpoint."""
        self._step, self._began, self._waited = step, time.perf_counter(), self._seconds_waited() or 0.0

    def _seconds_waited(self) -> float | None:
        streams = root_of(self._root).streams
        return None if streams.device.has_streams else streams.seconds_waited


def _memory_in_use(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated())
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
