"""Measurement of the costs from which a schedule is chosen: collectives once, computation in the next steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from composable_fsdp._comm.communicator import Communicator, Transfer
from composable_fsdp._comm.verify_ranks import gather_rows, multi_rank_axes
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.streams import Work, blocks_the_host
from composable_fsdp._runtime.schedule.costs import AxisCosts, CollectiveCost, Costs
from composable_fsdp._runtime.schedule.schedule import Hook
from composable_fsdp._sharding.mesh import DataParallelAxes

__all__ = ["Calibration"]

_SIZES = (1 << 12, 1 << 24)
"""Bytes of the full tensors of the measured collectives. Estimated; swept in virtual time only."""
_REPEATS = 3
_COPY_BYTES = 1 << 24
_NANOSECOND = 1e-9

Mark: TypeAlias = Any
"""A point in time: an event on the current stream, or seconds of the host's clock."""


class Calibration:
    """The measurement of one root's costs. All ranks must create it, and run the same steps with it.

    Args:
        axes: the mesh axes of all groups.
        names: the groups with parameters.
        steps: the number of forwards and backwards to measure, at least 1. The median counts.
    """

    def __init__(self, axes: Collection[DataParallelAxes], names: Sequence[str], steps: int) -> None:
        self._axes = tuple(axes)
        self._names = names
        self._steps_left = steps
        self._clock = _Clock(self._axes[0].device)
        self._running: list[str] = []
        """The groups whose modules run or are in backward, innermost last."""
        self._left: Mark | None = None
        """The end of the last hook."""
        self._segments: list[tuple[bool, str, Mark, Mark]] = []
        """The intervals of computation of this step: in backward or not, group, begin, end."""
        self._seconds: dict[tuple[bool, str], list[float]] = defaultdict(list)
        self._collectives: dict[str, AxisCosts] = {}

    def begin_step(self) -> Costs | None:
        """Begin a step, before its forward. Return the costs after the last one, and ``None`` before that."""
        self._end_step()
        if not self._collectives:
            self._collectives = self._measure_collectives()
        if self._steps_left == 0:
            return self._agreed_costs()
        self._steps_left -= 1
        return None

    def enter(self, hook: Hook, group: str, *, in_backward: bool) -> None:
        """Note that the runtime begins to work for ``hook`` of ``group``."""
        if self._left is not None:
            computed = group if hook in (Hook.GRAD_READY, Hook.POST_BACKWARD) else self._running[-1]
            self._segments.append((in_backward, computed, self._left, self._clock.mark()))
        self._left = None

    def leave(self, hook: Hook, group: str, *, ends_pass: bool) -> None:
        """Note that the runtime has done its work for ``hook`` of ``group``. What follows a pass is not measured."""
        if group in self._running and hook is not Hook.GRAD_READY:
            self._running.remove(group)
        if hook in (Hook.PRE_FORWARD, Hook.PRE_BACKWARD):
            self._running.append(group)
        if ends_pass:
            self._running.clear()
        self._left = self._clock.mark() if self._running else None

    def _end_step(self) -> None:
        """Add up the computation of the last step."""
        if self._segments:
            self._clock.synchronize()
            totals: dict[tuple[bool, str], float] = defaultdict(float)
            for in_backward, group, begin, end in self._segments:
                totals[in_backward, group] += self._clock.seconds(begin, end)
            for key, seconds in totals.items():
                self._seconds[key].append(seconds)
        self._segments, self._running, self._left = [], [], None

    def _measure_collectives(self) -> dict[str, AxisCosts]:
        costs = {}
        for axes in self._axes:
            for name, communicator in zip(axes.names, (axes.shard, axes.replicate), strict=True):
                if communicator.size > 1:
                    costs[name] = self._axis_costs(communicator)
        return costs

    def _axis_costs(self, communicator: Communicator) -> AxisCosts:
        label = "measurement of costs"

        def gather(part: torch.Tensor, full: torch.Tensor) -> Work:
            return communicator.all_gather([Transfer(full, part)], label)

        def scatter(part: torch.Tensor, full: torch.Tensor) -> Work:
            return communicator.reduce_scatter([Transfer(part, full)], ReduceOp.SUM, label)

        def all_reduce(_: torch.Tensor, full: torch.Tensor) -> Work:
            return communicator.all_reduce([full], ReduceOp.SUM, label)

        return AxisCosts(*(self._cost(communicator, each) for each in (gather, scatter, all_reduce)))

    def _cost(self, communicator: Communicator, launch: Callable[[torch.Tensor, torch.Tensor], Work]) -> CollectiveCost:
        """Return the line through the times of a small and a large message."""
        ranks, samples = communicator.size, list[tuple[float, float]]()
        for nbytes in _SIZES:
            numel = -(-nbytes // (4 * ranks)) * ranks
            part, full = (
                communicator.allocate(n, torch.float32, self._clock.device).zero_() for n in (numel // ranks, numel)
            )
            times = [self._clock.time(partial(_wait_for, launch, part, full)) for _ in range(1 + _REPEATS)]
            samples.append((full.nbytes * (ranks - 1) / ranks, min(times[1:])))
        (small, least), (large, most) = samples
        bandwidth = (large - small) / max(most - least, _NANOSECOND)
        return CollectiveCost(max(0.0, least - small / bandwidth), bandwidth)

    def _copy_bandwidth(self) -> float:
        source = torch.zeros(_COPY_BYTES // 4, device=self._clock.device)
        copy = partial(torch.empty_like(source).copy_, source)
        return _COPY_BYTES / max(_NANOSECOND, min(self._clock.time(copy) for _ in range(_REPEATS)))

    def _agreed_costs(self) -> Costs:
        """Return the medians over all ranks."""
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        own = [self._copy_bandwidth()]
        for costs in self._collectives.values():
            own += [value for kind in kinds for value in (getattr(costs, kind).latency, getattr(costs, kind).bandwidth)]
        for in_backward in (False, True):
            own += [median(self._seconds.get((in_backward, name), [0.0])) for name in self._names]
        values = iter(self._median_over_ranks(own))
        copy_bandwidth = next(values)
        axes = {
            name: AxisCosts(*(CollectiveCost(next(values), next(values)) for _ in kinds)) for name in self._collectives
        }
        forward = {name: next(values) for name in self._names}
        backward = {name: next(values) for name in self._names}
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return Costs(axes, forward, backward, copy_bandwidth, source=f"measured on this job of {ranks} ranks")

    def _median_over_ranks(self, own: Sequence[float]) -> list[float]:
        values = list(own)
        for axes in self._axes:
            for axis in multi_rank_axes((axes.shard, axes.replicate)):
                sent = torch.tensor(values, dtype=torch.float64, device=self._clock.device)
                rows = gather_rows(sent, [axis], "agreement on measured costs").tolist()
                values = [median(column) for column in zip(*rows, strict=True)]
        return values


def _wait_for(launch: Callable[..., Work], *tensors: torch.Tensor) -> None:
    launch(*tensors).wait()


class _Clock:
    """The clock of the computation on ``device``: events on its streams, or the host's clock where waits block it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = None if blocks_the_host(device) else torch.get_device_module(device)

    def mark(self) -> Mark:
        """Return the current point in time of the current stream."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two marks, after :meth:`synchronize`."""
        return end - begin if self._module is None else 1e-3 * float(begin.elapsed_time(end))

    def synchronize(self) -> None:
        """Block the host until all marks have been reached."""
        if self._module is not None:
            event = self._module.Event(enable_timing=True)
            event.record()
            event.synchronize()

    def time(self, function: Callable[[], object]) -> float:
        """Return the seconds that ``function`` takes on the device."""
        begin = self.mark()
        function()
        end = self.mark()
        self.synchronize()
        return self.seconds(begin, end)
