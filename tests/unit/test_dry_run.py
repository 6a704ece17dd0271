"""Steady iterations of drawn models perform exactly the printed schedule, which is a dry run of the last one."""

from __future__ import annotations

from unittest import mock

from hypothesis import HealthCheck, given, settings
from torch.optim import SGD

from composable_fsdp.trace import Operation
from tests._internals import lazy_init
from tests.goldens.dry_runs import performed
from tests.unit.test_schedule_performed import SHOWN, Drawn, build, fake_ranks, models, play


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize=True)
@given(models())
def test_a_steady_iteration_performs_what_its_dry_run_says(drawn: Drawn) -> None:
    with fake_ranks(), mock.patch.object(lazy_init, "_spine", "new"):
        model = build(drawn)
        optimizer = SGD(model.parameters(), 0.1)  # type: ignore[attr-defined]
        for _ in range(2):
            play(model, drawn)
            if not drawn.is_synced:  # a step without any reduced gradient is refused
                first = optimizer.param_groups[0]["params"][0]
                first.grad = first.new_zeros(first.shape)
            optimizer.step()
        optimizer.zero_grad()
        expected = list(performed(model.schedule(), []))
        found = [str(event) for event in play(model, drawn) if event.operation in SHOWN]
        assert found == expected, model.schedule()


def test_the_schedule_before_a_first_backward_has_the_forward_only() -> None:
    with fake_ranks(), mock.patch.object(lazy_init, "_spine", "new"):
        drawn = Drawn(((8, True, True), (8, True, True)), (), False, (0, 1), 1, None, 0, False, None, True, True)
        model = build(drawn)
        assert not model.schedule().steps
        with mock.patch("torch.Tensor.backward"):
            events = play(model, drawn)
        lines = list(performed(model.schedule(), []))
        assert lines.pop(0) == "reshard root"  # kept for a backward, and an optimizer may step before the next forward
        assert sorted(lines) == sorted(str(event) for event in events if event.operation in SHOWN)
        assert not any(line.startswith(Operation.REDUCE.value) for line in lines)
