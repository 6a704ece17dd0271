"""Predicted times of schedules, compared with values computed by hand and with bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests._internals import CollectiveCost, Costs, Event, GroupSpec, Hook, simulate
from tests._internals import dry_run as s

MIB = 1 << 20
NAMES = "abc"
SECONDS = st.floats(0, 1)


def chain_of(names: Sequence[str], ahead: int) -> s.Schedule:
    """Return the schedule of a forward of groups in the order of ``names`` and of its backward, one reduction each.

    The next ``ahead`` groups are gathered before the wait for one, and a reduction waits for the one before it.
    """
    steps: list[s.Step] = []

    def gathers(order: Sequence[str], at: int) -> tuple[s.Action, ...]:
        new = order[at + ahead :][:1] if at and ahead else order[at : at + 1 + ahead]
        return (*(s.Gather((name,)) for name in new), s.Wait(order[at]))

    for at, name in enumerate(names):
        steps.append(s.Step(Event(Hook.PRE_FORWARD, name), gathers(names, at)))
        steps.append(s.Step(Event(Hook.POST_FORWARD, name), (s.Free(name),)))
    order = names[::-1]
    for at, name in enumerate(order):
        steps.append(s.Step(Event(Hook.PRE_BACKWARD, name), gathers(order, at)))
        if name not in order[at + 1 :]:
            reduce = s.Reduce((name,))
            waits = (s.WaitReduce(1),) if len(set(order[at:])) < len(set(order)) else ()
            steps.append(s.Step(Event(Hook.GRAD_READY, name), (*waits, reduce)))
        steps.append(s.Step(Event(Hook.POST_BACKWARD, name), (s.Free(name),)))
    return s.Schedule((*steps, s.Step(Event(Hook.END_BACKWARD), (s.WaitReduce(1),))))


def specs_of(**options: Any) -> dict[str, GroupSpec]:
    return dict.fromkeys(NAMES, GroupSpec(MIB, MIB, ranks=8, **options))


def costs_of(latency: float, compute: float, bandwidth: float = 1e18) -> Costs:
    cost = CollectiveCost(latency, bandwidth)
    times = dict.fromkeys(NAMES, compute)
    return Costs(cost, cost, times, times)


def test_a_prefetched_chain_exposes_the_first_gather_and_the_last_reduction() -> None:
    timeline = simulate(chain_of(NAMES, 1), specs_of(separate_reduce=True), costs_of(latency=1.0, compute=2.0))
    assert timeline.exposed == pytest.approx(3.0, abs=1e-6), "the first gather of each pass, and the last reduction"
    assert timeline.seconds == pytest.approx(15.0, abs=1e-6)


def test_without_prefetching_every_gather_is_exposed() -> None:
    timeline = simulate(chain_of(NAMES, 0), specs_of(separate_reduce=True), costs_of(latency=1.0, compute=2.0))
    assert timeline.exposed == pytest.approx(7.0, abs=1e-6), "three gathers in each pass and the last reduction"


def test_the_host_waits_for_a_reduction_before_it_launches_the_next_one() -> None:
    costs = replace(costs_of(0.0, compute=1.0), shard=CollectiveCost(0.0, MIB))
    specs = {name: replace(spec, full_bytes=0, gradient_bytes=3 * 8 * MIB // 7) for name, spec in specs_of().items()}
    spans = {span.label: span for span in simulate(chain_of(NAMES, 1), specs, costs).spans}
    assert spans["gradients ready b"].begin == pytest.approx(spans["reduce c"].begin)
    assert spans["gradients ready a"].begin == pytest.approx(spans["reduce c"].end) == pytest.approx(7.0)


@given(SECONDS, SECONDS, SECONDS, st.integers(0, 3))
def test_a_step_takes_at_least_its_computation_and_its_wire_and_more_with_a_longer_latency(
    latency: float, more: float, compute: float, ahead: int
) -> None:
    plan = chain_of(NAMES, ahead)
    timeline = simulate(plan, specs_of(), costs_of(latency, compute))
    wire = sum(span.end - span.begin for span in timeline.spans if span.stream != "compute")
    assert timeline.seconds >= max(6 * compute, wire) - 1e-9
    assert timeline.exposed >= -1e-9
    assert simulate(plan, specs_of(), costs_of(latency + more, compute)).seconds >= timeline.seconds - 1e-9


def test_the_time_of_a_group_is_that_of_all_its_runs() -> None:
    costs = costs_of(latency=0.0, compute=1.0)
    once, repeated = (simulate(chain_of(order, 0), specs_of(), costs) for order in (NAMES, 2 * NAMES))
    assert repeated.seconds == pytest.approx(once.seconds)


def test_messages_are_copied_once_by_the_first_wait_of_their_groups() -> None:
    costs = replace(costs_of(0.0, 0.0), copy_bandwidth=MIB)
    specs = specs_of(gather_copied_bytes=MIB)
    fused = s.Schedule((s.Step(Event(Hook.PRE_FORWARD, "a"), (s.Gather(tuple("abc")), s.Wait("a"), s.Wait("b"))),))
    assert [(span.label, span.end - span.begin) for span in simulate(fused, specs, costs).spans[1:]] == [
        ("copy out of gather a", 3.0)
    ]


def test_replicas_add_their_all_reduce() -> None:
    plain, hybrid = specs_of(), specs_of(replicas=4)
    seconds = [
        simulate(chain_of(NAMES, 1), specs, costs_of(latency=0.5, compute=2.0)).seconds for specs in (plain, hybrid)
    ]
    assert seconds[1] == pytest.approx(seconds[0] + 1.0, abs=1e-6), "the last one, which nothing hides"


def test_one_rank_sends_nothing() -> None:
    assert CollectiveCost(1.0, 1.0).seconds(MIB, 1) == 0.0
    assert CollectiveCost(1.0, 0.5 * MIB, per_rank=3.0).seconds(MIB, 2) == 1.0 + 3.0 + 1.0
    assert CollectiveCost(1.0, 0.5 * MIB, per_rank=3.0).seconds(MIB, 2, messages=2) == 2 * (1.0 + 3.0) + 1.0
