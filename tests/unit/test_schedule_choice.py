"""Choice of schedule settings from costs: never slower than the default as predicted, within its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.plugins.tuning import AxisCosts, CollectiveCost, Costs
from tests._internals import (
    DEFAULT_SETTINGS,
    EXTRA_BYTES,
    GradientMemory,
    GroupSpec,
    ScheduleSettings,
    Timeline,
    choose,
    schedule,
    simulate,
)
from tests.helpers.chain_schedule import chain_schedule

PLAIN = ScheduleSettings(zero_copy=False, grad_buckets=1, max_fused_bytes=0)
MIB = 1 << 20
NAMES = [f"layers.{i}" for i in range(6)]


def specs_of(size: int, settings: ScheduleSettings) -> dict[str, GroupSpec]:
    """Return the properties of equal groups of ``size`` bytes, each with four large parameters."""
    specs = {}
    for name in NAMES:
        buckets = settings.grad_buckets
        part = size // buckets
        specs[name] = GroupSpec(
            name,
            unsharded_bytes=size,
            full_bytes=size,
            gradient_bytes=(2 * part,) * buckets,
            ranks=64,
            gather_messages=4 if settings.zero_copy else 1,
            gather_copied_bytes=0 if settings.zero_copy else size,
            late_bytes=0 if settings.zero_copy else size,
            gradient_memory=(GradientMemory(part, 3 * part, 2 * part, part // 32),) * buckets,
            gradients=tuple(((number, part),) for number in range(buckets)),
        )
    return {"root": GroupSpec("root", has_parameters=False), **specs}


@contextmanager
def extra_bytes(bound: int) -> Iterator[None]:
    """Let choices exceed the peak of the plain settings by ``bound`` bytes."""
    with mock.patch("composable_fsdp.plugins.tuning.choose.EXTRA_BYTES", bound):
        yield


def costs_of(latency: float, bandwidth: float, compute: float) -> Costs:
    cost = CollectiveCost(latency, bandwidth)
    times = dict.fromkeys(NAMES, compute)
    return Costs({"": AxisCosts(cost, cost, cost)}, times, times, copy_bandwidth=1e12)


def predicting(size: int, costs: Costs, *, has_streams: bool = True) -> Callable[[ScheduleSettings], Timeline]:
    """Return the function from settings to the timeline of a step."""

    def predict(settings: ScheduleSettings) -> Timeline:
        specs = specs_of(size, settings)
        limits = schedule.Limits(settings.prefetch_limit, settings.max_fused_bytes, has_streams)
        return simulate(chain_schedule(specs, limits), specs, costs)

    return predict


SIZES = st.sampled_from([1 << 10, 1 << 18, 1 << 22, 1 << 28])
TIMES = st.sampled_from([0.0, 1e-6, 1e-4, 1e-2])


@given(SIZES, TIMES, st.sampled_from([1e6, 1e9, 5e10, 4e11]), TIMES, st.booleans())
def test_a_choice_is_as_predicted_and_neither_slower_nor_larger_than_allowed(
    size: int, latency: float, bandwidth: float, compute: float, has_streams: bool
) -> None:
    predict = predicting(size, costs_of(latency, bandwidth, compute), has_streams=has_streams)
    choice = choose(predict, "a test")
    default, plain, chosen = (predict(each) for each in (DEFAULT_SETTINGS, PLAIN, choice.settings))
    assert (choice.seconds, choice.peak_bytes) == (chosen.seconds, chosen.peak_bytes)
    assert choice.default_seconds == default.seconds
    assert 0.995 * choice.seconds <= plain.seconds
    assert 0.995 * choice.seconds <= default.seconds or default.excess_over(plain) > EXTRA_BYTES
    assert chosen.excess_over(plain) <= EXTRA_BYTES
    assert chosen.peak_bytes <= plain.peak_bytes + EXTRA_BYTES
    assert choose(predict, "a test") == choice, "the same on every rank"
    again = choose(predict, "a test", current=choice.settings, before=choice.seconds)
    assert again.settings == choice.settings, "nothing has changed"


@given(TIMES, TIMES, st.integers(0, 4), st.sampled_from([0, 1 << 16, 1 << 24]))
def test_what_the_user_has_set_is_kept(latency: float, compute: float, limit: int, fused: int) -> None:
    current = ScheduleSettings(prefetch_limit=limit, max_fused_bytes=fused)
    choice = choose(
        predicting(1 << 22, costs_of(latency, 5e10, compute)),
        "a test",
        current=current,
        fixed={"prefetch_limit", "max_fused_bytes"},
    )
    assert (choice.settings.prefetch_limit, choice.settings.max_fused_bytes) == (limit, fused)


def test_a_long_latency_gives_few_messages_and_a_short_one_many() -> None:
    def settings(latency: float) -> ScheduleSettings:
        with extra_bytes(1 << 40):
            return choose(predicting(1 << 28, costs_of(latency, 5e10, 5e-2)), "a test").settings

    assert settings(1e-6) == DEFAULT_SETTINGS
    slow = settings(5e-2)
    assert (slow.zero_copy, slow.grad_buckets) == (False, 1)


def test_settings_are_kept_unless_others_are_clearly_faster() -> None:
    def kept(compute: float, *, is_first: bool) -> bool:
        predict, current = predicting(1 << 28, costs_of(1e-6, 5e10, compute)), ScheduleSettings(grad_buckets=2)
        seconds = [predict(each).seconds for each in (current, DEFAULT_SETTINGS)]
        assert seconds[0] > seconds[1]
        before = None if is_first else seconds[0]
        with extra_bytes(1 << 40):
            choice = choose(predict, "a test", current=current, before=before)
        return choice.settings == current

    assert [kept(5e-1, is_first=first) for first in (True, False)] == [True, True], "no prediction is that exact"
    assert [kept(2.5e-2, is_first=first) for first in (True, False)] == [False, True], "a change rebuilds groups"
    assert [kept(1.2e-2, is_first=first) for first in (True, False)] == [False, False]


def test_a_choice_prints_settings_prediction_and_source() -> None:
    text = str(choose(predicting(MIB, costs_of(1e-5, 5e10, 1e-3)), "a test"))
    for name in ("zero_copy", "grad_buckets", "prefetch_limit", "max_fused_bytes", "predicted", "without costs"):
        assert name in text
    assert text.endswith("costs            a test")


def test_a_bound_on_extra_memory_is_used_and_kept() -> None:
    """The network is slower than the computation, so that a deeper prefetch and an early reduction pay."""
    size, costs = 1 << 28, costs_of(1e-6, 5e10, 1.2e-2)
    predict = predicting(size, costs)
    plain = predict(PLAIN)
    excess, seconds = [], []
    for extra in (0, size // 2, 4 * size):
        with extra_bytes(extra):
            choice = choose(predict, "a test")
        excess.append(predict(choice.settings).excess_over(plain))
        seconds.append(choice.seconds)
        assert excess[-1] <= extra
    assert excess[0] == 0
    assert excess[0] <= excess[1] < excess[2]
    assert seconds[0] >= seconds[1] > seconds[2]
