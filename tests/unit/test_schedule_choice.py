"""Choice of schedule settings from costs: never slower than the default as predicted, within its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp import AxisCosts, CollectiveCost, Costs
from tests._internals import (
    DEFAULT_SETTINGS,
    GroupSpec,
    ScheduleOptions,
    ScheduleSettings,
    choose,
    passes,
    simulate,
)
from tests._internals import schedule as s

MIB = 1 << 20
NAMES = [f"layers.{i}" for i in range(6)]
ORDER = [
    s.Event(s.Hook.PRE_FORWARD, "root"),
    *(s.Event(hook, name) for name in NAMES for hook in (s.Hook.PRE_FORWARD, s.Hook.POST_FORWARD)),
    s.Event(s.Hook.POST_FORWARD, "root"),
]


def specs_of(size: int, settings: ScheduleSettings) -> dict[str, GroupSpec]:
    """Return the properties of equal groups of ``size`` bytes, each with four large parameters."""
    buckets = settings.grad_buckets
    specs = {
        name: GroupSpec(
            name,
            unsharded_bytes=size,
            full_bytes=size,
            gradient_bytes=(2 * size // buckets,) * buckets,
            is_small=size <= settings.max_fused_bytes // 2,
            reduces_grad_buckets=buckets > 1 and size > settings.max_fused_bytes // 2,
            ranks=64,
            gather_messages=4 if settings.zero_copy else 1,
            gather_copied_bytes=0 if settings.zero_copy else size,
        )
        for name in NAMES
    }
    return {"root": GroupSpec("root", has_parameters=False, is_root=True, has_nested=True), **specs}


def costs_of(latency: float, bandwidth: float, compute: float) -> Costs:
    cost = CollectiveCost(latency, bandwidth)
    times = dict.fromkeys(NAMES, compute)
    return Costs({"": AxisCosts(cost, cost, cost)}, times, times, copy_bandwidth=1e12, source="a test")


def predicted(size: int, settings: ScheduleSettings, options: ScheduleOptions, costs: Costs) -> tuple[float, int, int]:
    specs = specs_of(size, settings)
    options = replace(options, prefetch_limit=settings.prefetch_limit, max_fused_bytes=settings.max_fused_bytes)
    timeline = simulate(passes.build(ORDER, specs, options), specs, costs)
    return timeline.seconds, timeline.peak_bytes, timeline.bounded_bytes


SIZES = st.sampled_from([1 << 10, 1 << 18, 1 << 22, 1 << 28])
TIMES = st.sampled_from([0.0, 1e-6, 1e-4, 1e-2])


@given(SIZES, TIMES, st.sampled_from([1e6, 1e9, 5e10, 4e11]), TIMES, st.booleans())
def test_a_choice_is_as_predicted_and_neither_slower_nor_larger_than_allowed(
    size: int, latency: float, bandwidth: float, compute: float, host_waits: bool
) -> None:
    options, costs = ScheduleOptions(host_waits=host_waits), costs_of(latency, bandwidth, compute)
    choice = choose(ORDER, lambda settings: specs_of(size, settings), options, costs)
    default = predicted(size, DEFAULT_SETTINGS, options, costs)
    plain = predicted(size, ScheduleSettings(False, 1, max_fused_bytes=0), options, costs)
    *found, bounded = predicted(size, choice.settings, options, costs)
    assert [choice.seconds, choice.peak_bytes] == found
    assert choice.default_seconds == default[0]
    assert choice.seconds <= default[0]
    assert bounded <= max(default[2], plain[2])
    assert choose(ORDER, lambda settings: specs_of(size, settings), options, costs) == choice, "the same on every rank"
    again = choose(ORDER, lambda each: specs_of(size, each), options, costs, current=choice.settings, is_first=False)
    assert again.settings == choice.settings, "nothing has changed"


@given(TIMES, TIMES, st.integers(0, 4), st.sampled_from([0, 1 << 16, 1 << 24]))
def test_what_the_user_has_set_is_kept(latency: float, compute: float, limit: int, fused: int) -> None:
    current = ScheduleSettings(prefetch_limit=limit, max_fused_bytes=fused)
    choice = choose(
        ORDER,
        lambda settings: specs_of(1 << 22, settings),
        ScheduleOptions(),
        costs_of(latency, 5e10, compute),
        current=current,
        fixed={"prefetch_limit", "max_fused_bytes"},
    )
    assert (choice.settings.prefetch_limit, choice.settings.max_fused_bytes) == (limit, fused)


def test_a_long_latency_gives_few_messages_and_a_short_one_many() -> None:
    def settings(latency: float) -> ScheduleSettings:
        costs = costs_of(latency, 5e10, 5e-2)
        return choose(ORDER, lambda each: specs_of(1 << 28, each), ScheduleOptions(), costs).settings

    assert settings(1e-6) == DEFAULT_SETTINGS
    slow = settings(5e-2)
    assert (slow.zero_copy, slow.grad_buckets) == (False, 1)


def test_settings_are_kept_unless_others_are_clearly_faster() -> None:
    def kept(compute: float) -> bool:
        costs, current = costs_of(1e-6, 5e10, compute), ScheduleSettings(grad_buckets=2)
        seconds = [predicted(1 << 28, each, ScheduleOptions(), costs)[0] for each in (current, DEFAULT_SETTINGS)]
        assert seconds[0] > seconds[1]
        options, specs = ScheduleOptions(), partial(specs_of, 1 << 28)
        assert choose(ORDER, specs, options, costs, current=current).settings != current, "the first choice"
        return choose(ORDER, specs, options, costs, current=current, is_first=False).settings == current

    assert kept(compute=5e-1)
    assert not kept(compute=1.2e-2)


def test_a_choice_prints_settings_prediction_and_source() -> None:
    text = str(choose(ORDER, lambda each: specs_of(MIB, each), ScheduleOptions(), costs_of(1e-5, 5e10, 1e-3)))
    for name in ("zero_copy", "grad_buckets", "prefetch_limit", "max_fused_bytes", "predicted", "without costs"):
        assert name in text
    assert text.endswith("costs            a test")
