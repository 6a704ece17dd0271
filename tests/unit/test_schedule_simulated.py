"""Predicted time and memory of schedules, compared with values computed by hand and with bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.plugins.tuning import AxisCosts, CollectiveCost, Costs
from tests._internals import GradientMemory, GroupSpec, fit_computation, schedule, simulate
from tests._internals import events as s
from tests.helpers.chain_schedule import HOST, STREAMS, chain_schedule

MIB = 1 << 20
NAMES = "abc"
EAGER_HOST = replace(HOST, prefetch=0)
SECONDS = st.floats(0, 1)


def specs_of(**options: object) -> dict[str, GroupSpec]:
    values: dict[str, Any] = {"gradient_memory": (GradientMemory(MIB, MIB, MIB),), "ranks": 8, **options}
    values.setdefault("gradient_bytes", (MIB,))
    specs = {n: GroupSpec(n, MIB, MIB, **values) for n in NAMES}
    return {"root": GroupSpec("root", has_parameters=False), **specs}


def costs_of(latency: float, compute: float, bandwidth: float = 1e18) -> Costs:
    cost = CollectiveCost(latency, bandwidth)
    times = dict.fromkeys(NAMES, compute)
    return Costs({"": AxisCosts(cost, cost, cost)}, times, times)


def test_a_prefetched_chain_exposes_the_first_gather_and_the_last_reduction() -> None:
    timeline = simulate(chain_schedule(specs_of(), STREAMS), specs_of(), costs_of(latency=1.0, compute=2.0))
    assert timeline.exposed == pytest.approx(2.0, abs=1e-6)
    assert timeline.seconds == pytest.approx(14.0, abs=1e-6)


def test_without_prefetching_every_gather_is_exposed() -> None:
    specs = specs_of(separate_reduce=True)
    timeline = simulate(chain_schedule(specs, replace(STREAMS, prefetch=0)), specs, costs_of(latency=1.0, compute=2.0))
    assert timeline.exposed == pytest.approx(7.0, abs=1e-6), (
        "three gathers in each pass and the last reduction are exposed"
    )


def test_the_host_waits_for_a_reduction_before_it_launches_the_next_one() -> None:
    fast, slow, specs = CollectiveCost(0.0, 1e18), CollectiveCost(3.0, 1e18), specs_of(separate_reduce=True)
    costs = replace(costs_of(0.0, compute=1.0), axes={"": AxisCosts(fast, slow, slow)})
    spans = {span.label: span for span in simulate(chain_schedule(specs, HOST), specs, costs).spans}
    assert spans["gradients ready b bucket 0"].begin == pytest.approx(spans["reduce c[0]"].begin)
    assert spans["gradients ready a bucket 0"].begin == pytest.approx(spans["reduce c[0]"].end)


def test_predicted_memory_is_the_unsharded_groups_plus_reductions_in_flight() -> None:
    timeline = simulate(chain_schedule(specs_of(), HOST), specs_of(), costs_of(1.0, 2.0))
    after = dict(timeline.memory)
    assert after[s.Event(s.Hook.PRE_FORWARD, "a")] == 2 * MIB
    assert after[s.Event(s.Hook.END_FORWARD)] == 0
    assert timeline.peak_bytes == 4 * MIB, "two unsharded groups, gradients that arrive, and those of the last group"
    assert after[s.Event(s.Hook.END_BACKWARD)] == 0


@given(SECONDS, SECONDS, SECONDS, st.integers(0, 3), st.booleans(), st.booleans())
def test_a_step_takes_at_least_its_computation_and_its_wire_and_more_with_a_longer_latency(
    latency: float, more: float, compute: float, limit: int, has_streams: bool, is_fused: bool
) -> None:
    specs, limits = specs_of(), schedule.Limits(limit, 2 * MIB if is_fused else 0, has_streams)
    plan = chain_schedule(specs, limits)
    timeline = simulate(plan, specs, costs_of(latency, compute))
    wire = sum(span.end - span.begin for span in timeline.spans if span.stream != "compute")
    assert timeline.seconds >= max(6 * compute, wire) - 1e-9
    assert timeline.exposed >= -1e-9
    assert simulate(plan, specs, costs_of(latency + more, compute)).seconds >= timeline.seconds - 1e-9


def test_the_time_of_a_group_is_that_of_all_its_runs() -> None:
    costs = costs_of(latency=0.0, compute=1.0)
    once, repeated = (
        simulate(chain_schedule(specs_of(), STREAMS, order), specs_of(), costs) for order in (NAMES, 2 * NAMES)
    )
    assert repeated.seconds == pytest.approx(once.seconds)


def test_messages_are_in_memory_until_their_wait() -> None:
    specs, packed = specs_of(), specs_of(gather_copied_bytes=MIB)
    peaks = [simulate(chain_schedule(s, STREAMS), s, costs_of(1.0, 2.0)).peak_bytes for s in (specs, packed)]
    assert peaks[1] == peaks[0] + MIB


def test_messages_that_are_copied_out_late_are_beside_the_parameters_for_a_moment() -> None:
    specs = specs_of(gather_copied_bytes=MIB, late_bytes=MIB, gradient_memory=(GradientMemory(),))
    timeline = simulate(chain_schedule(specs, EAGER_HOST), specs, costs_of(1.0, 2.0))
    assert dict(timeline.memory)[s.Event(s.Hook.PRE_FORWARD, "a")] == MIB, "the message is freed by the wait"
    assert timeline.peak_bytes == 2 * MIB


def test_gradients_arrive_are_sent_and_stay_sharded() -> None:
    memory = GradientMemory(arrived=2 * MIB, launched=7 * MIB, in_flight=5 * MIB, sharded=MIB)
    specs = specs_of(gradient_memory=(memory,))
    timeline = simulate(chain_schedule(specs, EAGER_HOST), specs, costs_of(1.0, 2.0))
    after = dict(timeline.memory)
    assert after[s.Event(s.Hook.GRAD_READY, "c", 0)] == MIB + 5 * MIB, "unsharded parameters and messages"
    assert after[s.Event(s.Hook.POST_BACKWARD, "a")] == 2 * MIB + 5 * MIB
    assert after[s.Event(s.Hook.END_BACKWARD)] == 3 * MIB
    assert timeline.peak_bytes == MIB + 2 * MIB + 7 * MIB, "the last reduction is launched beside two sharded gradients"


def test_early_gradients_stay_until_the_group_is_complete() -> None:
    specs = specs_of()
    own: dict[str, Any] = {
        "unsharded_bytes": MIB,
        "full_bytes": MIB,
        "gradient_bytes": (MIB,),
        "has_parameters": True,
        "ranks": 8,
    }
    memory = GradientMemory(MIB, MIB, MIB)
    specs["root"] = replace(specs["root"], **own, gradient_memory=(memory,))
    gradients = ((0, MIB // 2), (1, MIB // 2))
    specs["root"] = replace(specs["root"], gradients=(gradients,), early_gradients=frozenset({1}))
    after = dict(simulate(chain_schedule(specs, EAGER_HOST), specs, costs_of(1.0, 2.0)).memory)
    assert after[s.Event(s.Hook.PRE_BACKWARD, "c")] == 2 * MIB + MIB // 2
    assert after[s.Event(s.Hook.END_BACKWARD)] == 0


def test_replicas_add_their_all_reduce() -> None:
    plain, hybrid = specs_of(), specs_of(replicas=4, replicate_axis="replicate")
    costs = costs_of(latency=1.0, compute=2.0)
    seconds = [simulate(chain_schedule(s, STREAMS), s, costs).seconds for s in (plain, hybrid)]
    assert seconds[1] == pytest.approx(seconds[0] + 1.0, abs=1e-6), "the last one, which nothing hides"


def test_one_rank_sends_nothing() -> None:
    assert CollectiveCost(1.0, 1.0).seconds(MIB, 1) == 0.0
    assert CollectiveCost(1.0, 0.5 * MIB, per_rank=3.0).seconds(MIB, 2) == 1.0 + 3.0 + 1.0
    assert CollectiveCost(1.0, 0.5 * MIB, per_rank=3.0).seconds(MIB, 2, messages=2) == 2 * (1.0 + 3.0) + 1.0


@given(st.floats(0, 20))
def test_fitted_computation_predicts_the_measured_step(waited: float) -> None:
    plan, costs = chain_schedule(specs_of(), STREAMS), costs_of(latency=1.0, compute=2.0)
    exposed = simulate(plan, specs_of(), costs).exposed
    fitted = fit_computation(plan, specs_of(), costs, waited)
    assert fitted.axes == costs.axes
    if waited <= exposed:
        assert fitted == costs, "collectives explain the waits"
    else:
        measured = 6 * 2.0 + waited
        assert simulate(plan, specs_of(), fitted).seconds == pytest.approx(measured, rel=0.01)
        assert fitted.forward["a"] / fitted.backward["b"] == pytest.approx(1.0), "of all groups alike"


def in_two_buckets(**options: Any) -> dict[str, GroupSpec]:
    half = MIB // 2
    return specs_of(
        gradient_bytes=(MIB, MIB),
        gradient_memory=(GradientMemory(half, 3 * half, 2 * half),) * 2,
        gradients=(((1, half),), ((0, half),)),
        **options,
    )


def test_all_gathers_of_two_axes_run_beside_each_other_and_reductions_do_not() -> None:
    specs = in_two_buckets() | {"b": replace(in_two_buckets()["b"], axis="other")}
    costs = costs_of(1e-9, 1e-9)
    spans = {span.label: span for span in simulate(chain_schedule(specs, STREAMS), specs, costs).spans}
    assert spans["gather b"].begin < spans["gather a"].end, "prefetched from the begin of a"
    assert spans["reduce b[0]"].begin >= spans["reduce c[1]"].end
