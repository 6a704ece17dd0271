"""Choice of the settings of a schedule by simulation. Pure: equal arguments give the same choice on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from html import escape
from typing import Any

from composable_fsdp._core.events import Schedule
from composable_fsdp._core.schedule import ScheduleSettings
from composable_fsdp.plugins.tuning.costs import Costs
from composable_fsdp.plugins.tuning.simulate import Timeline

__all__ = ["DEFAULT_SETTINGS", "EXTRA_BYTES", "Choice", "ScheduleOptions", "TunedSchedule", "choose"]


DEFAULT_SETTINGS = ScheduleSettings()
_PLAIN = ScheduleSettings(zero_copy=False, grad_buckets=1, max_fused_bytes=0)
"""One message per group and direction, as FSDP2 sends them."""

_CHANGES: Sequence[Mapping[str, Any]] = (
    *({"zero_copy": value} for value in (True, False)),
    *({"grad_buckets": value} for value in (4, 2, 1)),
    *({"prefetch_limit": value} for value in (1, 2, 3)),
    *({"max_fused_bytes": value} for value in (1 << 20, 1 << 23, 1 << 26)),
)
"""The changes of settings that are tried."""

EXTRA_BYTES = 8 << 20
"""The bytes by which the peak of a choice may exceed that of FSDP2's schedule: that of small groups that are fused."""

_HYSTERESIS = 0.02
"""A new choice must shorten the predicted step by this part of its time, since a change rebuilds groups. Estimated."""

_CHANGE = 0.1
"""If the predicted time of the current settings has changed by this part, the costs are others, and nothing is kept."""

_PRECISION = 0.005
"""The part of a step by which predictions are often wrong, as ``benchmarks/schedule_sweep.py`` prints."""


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The options of a schedule, each ``None`` for the default. ``FSDPModule.set_schedule`` says what they do.

    Args:
        prefetch_limit: the number of groups that are prefetched.
        max_unsharded_bytes: the bound of the bytes of unsharded parameters on this rank.
        max_fused_bytes: the bytes of full parameters up to which small groups share messages.
        costs: the table, given or measured, by which settings that are ``None`` are chosen.
    """

    prefetch_limit: int | None = None
    max_unsharded_bytes: int | None = None
    max_fused_bytes: int | None = None
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings that were chosen, and the prediction for them.

    Args:
        settings: the chosen settings.
        seconds: the predicted time of a step.
        peak_bytes: the predicted maximum of unsharded parameters, messages and gradients, sharded ones included.
        default_seconds: the predicted time of a step with the settings without costs.
        source: the origin of the costs.
        timeline: the predicted step.
    """

    settings: ScheduleSettings
    seconds: float
    peak_bytes: int
    default_seconds: float
    source: str
    timeline: Timeline = field(default=Timeline((), (), (0,)), compare=False, repr=False)

    @property
    def summary(self) -> str:
        """One line with the settings and the predicted time, for traces."""
        settings = ", ".join(f"{each.name}={getattr(self.settings, each.name)}" for each in fields(self.settings))
        return f"{settings}: {1e3 * self.seconds:.2f} ms per step predicted"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [f"{each.name:<16} {getattr(self.settings, each.name)}" for each in fields(self.settings)]
        return "\n".join(
            [
                *lines,
                f"{'predicted':<16} {1e3 * self.seconds:.2f} ms per step, {self.peak_bytes / 2**20:.0f} MiB",
                f"{'without costs':<16} {1e3 * self.default_seconds:.2f} ms per step",
                f"{'costs':<16} {self.source}",
            ]
        )


@dataclass(frozen=True, eq=False)
class TunedSchedule(Schedule):
    """A schedule with what its root was told. Two are equal if their steps are.

    Args:
        options: those that were set.
        choice: the last one by costs, if any.
    """

    options: ScheduleOptions
    choice: Choice | None


def choose(
    predict: Callable[[ScheduleSettings], Timeline],
    source: str,
    *,
    current: ScheduleSettings = DEFAULT_SETTINGS,
    default: ScheduleSettings = DEFAULT_SETTINGS,
    before: float | None = None,
    fixed: Collection[str] = (),
) -> Choice:
    """Return the settings with the shortest predicted step, under a limit of memory.

    The limit is the peak of the plain settings, which have a single message per group and direction as FSDP2 has, plus
    ``EXTRA_BYTES``. One change is made at a time, beginning with the current settings and with the
    plain ones, until none helps. If the best are hardly faster than the current ones, or than the plain ones, these are
    chosen.

    Args:
        predict: returns the timeline of a step with given settings.
        source: the source of the costs by which it predicts.
        current: the settings in use.
        default: the settings without costs.
        before: the time that was predicted for the current settings at the last choice; ``None`` at the first one. If
            it is about the same now, they are kept unless others are clearly faster.
        fixed: the settings that the user has set, which keep their current values.
    """
    predict = cache(predict)

    def rank(settings: ScheduleSettings) -> tuple[bool, float, int]:
        timeline = predict(settings)
        over = timeline.excess_over(predict(plain)) > EXTRA_BYTES
        return over, timeline.seconds, timeline.peak_bytes

    def improve(settings: ScheduleSettings) -> ScheduleSettings:
        while True:
            tried = [replace(settings, **change) for change in changes]
            best = min([settings, *tried], key=rank)
            if rank(best) >= rank(settings):
                return settings
            settings = best

    changes = [{name: value for name, value in change.items() if name not in fixed} for change in _CHANGES]
    kept = {name: getattr(current, name) for name in fixed}
    default, plain = replace(default, **kept), replace(_PLAIN, **kept)
    best = min((improve(current), improve(plain)), key=rank)
    is_new = before is None or abs(predict(current).seconds - before) > _CHANGE * before
    margin = _PRECISION if is_new else _HYSTERESIS
    near = [each for each in (current, plain) if rank(each)[0] == rank(best)[0]]
    best = next((each for each in near if (1 - margin) * predict(each).seconds <= predict(best).seconds), best)
    timeline = predict(best)
    return Choice(best, timeline.seconds, timeline.peak_bytes, predict(default).seconds, source, timeline)
