"""Measurement of the costs from which a schedule is chosen: of collectives, and of the computation of steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from composable_fsdp._consistency.order_check import MEASUREMENT
from composable_fsdp._consistency.verify_ranks import gather_rows, multi_rank_axes
from composable_fsdp._core.comm import Collective, Communicator, Transfer
from composable_fsdp._core.events import Hook
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp.plugins.tuning.clock import Clock, Mark
from composable_fsdp.plugins.tuning.costs import AxisCosts, CollectiveCost, Costs
from composable_fsdp.plugins.tuning.group_spec import axis_names

__all__ = [
    "Calibration",
    "StepObserver",
    "axes_costs",
    "collectives_of",
    "measure_collective",
    "measure_copies",
    "medians",
    "message_sizes",
    "over_ranks",
]

_LEAST, _MIDDLE, _MOST = 1 << 12, 1 << 20, 1 << 24
"""Bytes of the full tensors of the measured collectives. Estimated; swept in virtual time only."""
_LEAST_LARGE = 1 << 20
"""The bytes of the largest tensor at least, also if the model has smaller groups only."""
_NOISE = 0.01
"""The share of a measured time below which a difference says nothing about the bandwidth."""
_MOST_SECONDS = 0.1
"""The next larger tensor is left out if it is expected to take longer than this."""
_REPEATS = 2
_NANOSECOND = 1e-9

_BACKWARD_HOOKS = {Hook.PRE_BACKWARD, Hook.GRAD_READY, Hook.POST_BACKWARD, Hook.END_BACKWARD}


class _Entered(NamedTuple):
    """A hook that runs, its begin, the seconds waited before it, and whether it is part of a backward."""

    hook: Hook | None
    begin: float
    waited: float
    in_backward: bool


class StepObserver(Protocol):
    """An object to which the hooks of an iteration report: a :class:`Calibration`, or one with the same methods."""

    @property
    def waited(self) -> float:
        """As for :class:`Calibration`."""
        ...

    def begin_step(self) -> Costs | None:
        """Begin a step, before its forward. If costs are returned, they count from now on, and observation ends."""
        ...

    def enter(self, hook: Hook, group: str, *, in_backward: bool, waited: float) -> None:
        """Note that the runtime begins to work for ``hook`` of ``group``."""
        ...

    def leave(self, hook: Hook, group: str, *, ends_pass: bool, waited: float) -> None:
        """Note that the runtime has done its work for ``hook`` of ``group``."""
        ...


class Calibration:
    """The measurement of one root's costs. All ranks must create it, and run the same steps with it.

    Args:
        axes: the mesh axes of all groups.
        communicators: those of all axes along which ranks run the same model, also of tensor-parallel ones.
        groups: each group with parameters, by name.
        steps: the number of forwards and backwards to measure, at least 1. The median counts.
        clock: the clock of their computation.
    """

    def __init__(
        self,
        axes: Sequence[DataParallelAxes],
        communicators: Sequence[Communicator],
        groups: Mapping[str, ParamGroup],
        steps: int,
        clock: Clock,
    ) -> None:
        self._communicators = communicators
        self._names = tuple(groups)
        most = max(_LEAST_LARGE, max((group.plan.full_bytes for group in groups.values()), default=0))
        self._sizes = message_sizes(most)
        """The bytes of the messages: those of large models are no larger than their own, for the peak of memory."""
        self._steps_left = steps
        self._clock = clock
        self._running: list[str] = []
        """The groups whose modules run or are in backward, innermost last."""
        self._left: Mark | None = None
        """The end of the last hook."""
        self._segments: list[tuple[bool, str, Mark, Mark]] = []
        """The intervals of computation of this step: in backward or not, group, begin, end."""
        self._entered = _Entered(None, 0.0, 0.0, in_backward=False)
        """The running hook, or the last one."""
        self._last = ""
        """The last group with parameters that time was counted for."""
        self._host_seconds: dict[tuple[bool, str], float] = defaultdict(float)
        """The seconds of the runtime's work in this step, without waits. Empty on devices with streams."""
        self._waited = 0.0
        """The seconds of the waits in this step."""
        self._unread: list[tuple[float, dict[tuple[bool, str], float], list[tuple[bool, str, Mark, Mark]]]] = []
        """The waits, host seconds and segments of steps that the device had not ended so far."""
        self._steps: list[tuple[float, Mapping[tuple[bool, str], float]]] = []
        """The seconds of each step: those of its waits, and those of computation by pass and group."""
        self.waited = 0.0
        """The seconds for which waits block the host in a step; 0 on devices with streams. Set with the costs."""
        self._to_measure = collectives_of(axes)
        self._axes: Mapping[str, AxisCosts] = {}
        self._copy_bandwidth = 0.0

    def measure_collectives(self) -> None:
        """Measure each kind of collective and copies, and use the medians over ranks. The host waits for them."""
        sizes, clock = self._sizes, self._clock
        found = {(axis, kind): measure_collective(each, kind, sizes, clock) for axis, each, kind in self._to_measure}
        own = [value for cost in found.values() for value in (cost.latency, cost.bandwidth)]
        own.append(measure_copies(sizes[-1], clock))
        *medians_of, self._copy_bandwidth = over_ranks(medians, own, self._communicators, clock.device)
        self._axes = axes_costs(dict(zip(found, map(CollectiveCost, medians_of[::2], medians_of[1::2]), strict=True)))

    def begin_step(self) -> Costs | None:
        """Begin a step, before its forward. Return the costs after the last one, and ``None`` before that."""
        self._end_step()
        if self._steps_left == 0:
            return self._agreed_costs()
        self._steps_left -= 1
        return None

    def enter(self, hook: Hook, group: str, *, in_backward: bool, waited: float) -> None:
        """Note that the runtime begins to work for ``hook`` of ``group``.

        Args:
            hook: the hook.
            group: its group.
            in_backward: the current pass is a backward.
            waited: the seconds for which collectives have blocked the host so far.
        """
        if self._left is not None:
            computed = group if hook in (Hook.GRAD_READY, Hook.POST_BACKWARD) else self._running[-1]
            self._segments.append((in_backward, self._counted(computed, group), self._left, self._clock.mark()))
        self._left = None
        if hook is not Hook.END_FORWARD:  # part of the outermost module's post-forward
            self._entered = _Entered(hook, time.perf_counter(), waited, in_backward or hook in _BACKWARD_HOOKS)

    def leave(self, hook: Hook, group: str, *, ends_pass: bool, waited: float) -> None:
        """Note that the runtime has done its work for ``hook`` of ``group``. What follows a pass is not measured."""
        entered, begin, before, in_backward = self._entered
        if self._clock.is_host and hook is entered:  # not at the end of a forward without gradients
            self._waited += waited - before
            seconds = time.perf_counter() - begin - (waited - before)
            self._host_seconds[in_backward, self._counted(group, group)] += seconds
        if group in self._running and hook is not Hook.GRAD_READY:
            self._running.remove(group)
        if hook in (Hook.PRE_FORWARD, Hook.PRE_BACKWARD):
            self._running.append(group)
        if ends_pass:
            self._running.clear()
        self._left = self._clock.mark() if self._running else None

    def _counted(self, group: str, following: str) -> str:
        """Return the group for which time of ``group`` counts: if it has no parameters, the last one that has some."""
        found = next((name for name in (group, self._last, following) if name in self._names), group)
        self._last = found
        return found

    def _end_step(self) -> None:
        """End the last step, and add up the computation of those that the device has ended. The host does not wait."""
        if self._segments:
            self._unread.append((self._waited, self._host_seconds, self._segments))
        self._segments, self._running, self._left = [], [], None
        self._host_seconds, self._waited = defaultdict(float), 0.0
        while self._unread and self._clock.has_reached(self._unread[0][2][-1][3]):
            waited, totals, segments = self._unread.pop(0)
            for in_backward, group, begin, end in segments:
                totals[in_backward, group] += self._clock.seconds(begin, end)
            self._steps.append((waited, totals))

    def _agreed_costs(self) -> Costs:
        """Return the same costs on all ranks: medians of collectives, and the computation of the slowest rank."""
        self._clock.time(lambda: None)
        self._end_step()  # the device has ended all steps before that
        waited, seconds = _middle(self._steps)
        times = [waited, *(seconds.get((backward, name), 0.0) for backward in (False, True) for name in self._names)]
        values = iter(over_ranks(_of_slowest, times, self._communicators, self._clock.device))
        self.waited = next(values)
        forward = {name: next(values) for name in self._names}
        backward = {name: next(values) for name in self._names}
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return Costs(self._axes, forward, backward, self._copy_bandwidth, f"measured on this job of {ranks} ranks")


def measure_collective(communicator: Communicator, kind: str, sizes: Sequence[int], clock: Clock) -> CollectiveCost:
    """Return the line through the times of the smallest and the largest message. All ranks must call it together.

    Args:
        communicator: the communicator of an axis with several ranks.
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        sizes: the bytes of the full tensors, ascending. The largest ones are left out if they would take too long.
        clock: the clock of the tensors' device.
    """

    def run(part: torch.Tensor, full: torch.Tensor) -> None:
        transfers = {
            Collective.ALL_GATHER: Transfer(full, part),
            Collective.REDUCE_SCATTER: Transfer(part, full),
            Collective.ALL_REDUCE: Transfer(full, full),
        }
        communicator.launch(Collective(kind), [transfers[Collective(kind)]], MEASUREMENT).wait()

    ranks, samples, expected = communicator.size, list[tuple[float, float]](), 0.0
    for nbytes in sizes:
        if expected > _MOST_SECONDS:
            break
        numel = -(-nbytes // (4 * ranks)) * ranks
        part, full = (communicator.allocate(n, torch.float32, clock.device).zero_() for n in (numel // ranks, numel))
        times = [clock.time(partial(run, part, full)) for _ in range(1 + _REPEATS)]
        (seconds,) = over_ranks(medians, [min(times[1:])], [communicator], clock.device)
        samples.append((full.nbytes * (ranks - 1) / ranks, seconds))
        (small, least), (sent, last) = samples[0], samples[-1]
        expected = (last - least) * sizes[-1] / sent if len(samples) > 1 else 0.0
    (small, least), (large, most) = samples[0], samples[-1]
    longer = max(most - least, _NOISE * most, _NANOSECOND)
    bandwidth = (large - small or small) / longer  # equal with very many ranks
    return CollectiveCost(max(0.0, least - small / bandwidth), bandwidth)


def measure_copies(nbytes: int, clock: Clock) -> float:
    """Return the bytes per second at which the device copies half of ``nbytes`` in its memory."""
    source = torch.zeros(nbytes // 8, dtype=torch.float32, device=clock.device)
    copy = partial(torch.empty_like(source).copy_, source)
    return source.nbytes / max(_NANOSECOND, min(clock.time(copy) for _ in range(_REPEATS)))


_SHARD_KINDS = ("all_gather", "reduce_scatter")
_REPLICATE_KINDS = ("all_reduce",)
"""The kinds of collectives that are launched along an axis."""


def message_sizes(most: int = _MOST) -> list[int]:
    """Return the bytes of the messages to measure, ascending and at most ``most``."""
    return sorted({_LEAST, min(_MIDDLE, most), min(_MOST, most)})


def collectives_of(axes: Sequence[DataParallelAxes]) -> list[tuple[str, Communicator, str]]:
    """Return the collectives of training with ``axes``: name of the axis, its communicator and the kind."""
    return [
        (name, communicator, kind)
        for mesh, names_of_mesh in axis_names(axes).items()
        for name, communicator, kinds in zip(
            names_of_mesh, (mesh.shard, mesh.replicate), (_SHARD_KINDS, _REPLICATE_KINDS), strict=True
        )
        if communicator.size > 1
        for kind in kinds
    ]


def axes_costs(measured: Mapping[tuple[str, str], CollectiveCost]) -> dict[str, AxisCosts]:
    """Return the costs of each axis from those of its collectives, by name of the axis and kind."""
    return {name: _axis_costs(measured, name) for name in dict.fromkeys(name for name, _ in measured)}


def _axis_costs(measured: Mapping[tuple[str, str], CollectiveCost], name: str) -> AxisCosts:
    """Return the costs of an axis. An all-reduce counts as a reduce-scatter and an all-gather, where it is derived."""
    if (name, "all_reduce") in measured:
        both = measured[name, "all_reduce"]
        half = CollectiveCost(both.latency / 2, 2 * both.bandwidth, both.per_rank / 2)
        return AxisCosts(half, half, both)
    gather, scatter = (measured[name, kind] for kind in _SHARD_KINDS)
    both_bandwidth = 1 / (1 / gather.bandwidth + 1 / scatter.bandwidth)
    latency, per_rank = gather.latency + scatter.latency, gather.per_rank + scatter.per_rank
    return AxisCosts(gather, scatter, CollectiveCost(latency, both_bandwidth, per_rank))


def over_ranks(
    choose: Callable[[list[list[float]]], list[float]],
    own: Sequence[float],
    communicators: Sequence[Communicator],
    device: torch.device,
) -> list[float]:
    """Return ``choose`` of the ``own`` of all ranks, along each of ``communicators`` in turn. All must call it."""
    values = list(own)
    for axis in multi_rank_axes(communicators):
        sent = torch.tensor(values, dtype=torch.float64, device=device)
        values = choose(gather_rows(sent, [axis], MEASUREMENT).tolist())
    return values


def _middle(
    steps: Sequence[tuple[float, Mapping[tuple[bool, str], float]]],
) -> tuple[float, Mapping[tuple[bool, str], float]]:
    """Return the step with the median total. Medians of its parts would leave out interruptions, which are anywhere."""
    by_total = sorted(steps, key=lambda step: step[0] + sum(step[1].values()))
    return by_total[(len(steps) - 1) // 2] if steps else (0.0, {})


def medians(rows: list[list[float]]) -> list[float]:
    """Return the median of each column of ``rows``."""
    return [median(column) for column in zip(*rows, strict=True)]


def _of_slowest(rows: list[list[float]]) -> list[float]:
    """Return the row, of waits and computation, of the rank that computes longest: the others wait for it."""
    return max(rows, key=lambda row: sum(row[1:]))
