"""Test that backward on CPU gathers the next group once the current large group has sent most gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard
from composable_fsdp.testing import assert_trace, run_ranks
from composable_fsdp.trace import Operation, Recorder
from tests._internals import iteration_of, state_of
from tests.helpers.large_weights import WIDTH, Tower, batch, play
from tests.helpers.peak_memory import peak_above_idle
from tests.helpers.transports import COPIES, SOCKETS, TRANSPORTS, Environment

ORDER = (Operation.UNSHARD, Operation.WAIT, Operation.REDUCE, Operation.REDUCED)
GRAD_BUCKETS = 4


def towers(number: int = 3, *, ready: bool = True) -> Any:
    """Return consecutive groups of four gradient buckets each.

    With ``ready``, one forward has recorded their order.
    """
    blocks = [Tower() for _ in range(number)]
    model: Any = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    if ready:
        play(model, 0, dist.get_rank())
        model.zero_grad()
    return model


def record_backward(model: nn.Module) -> list[str]:
    """Return the operations of the groups in one backward."""
    loss = model(batch(1, dist.get_rank())).square().mean()
    with Recorder() as recorder:
        loss.backward()
    return [str(event) for event in recorder if event.operation in ORDER]


def gather_after_a_grad_bucket() -> None:
    loss = towers()(batch(1, dist.get_rank())).square().mean()
    with Recorder() as recorder:
        loss.backward()
    sent = ["reduce {0}", "reduced {0}"] * (GRAD_BUCKETS - 1)
    assert_trace(
        recorder,
        *("unshard 2", "wait 2"),
        *(line.format(2) for line in sent),
        *("unshard 1", "reduce 2", "wait 1", "reduced 2"),  # in flight while the last gradient bucket is computed
        *(line.format(1) for line in sent),
        *("unshard 0", "reduce 1", "wait 0", "reduced 1"),
        *(line.format(0) for line in sent),
        *("reduce 0", "reduced 0"),
        operations=ORDER,
    )


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("transport", [COPIES, SOCKETS], ids=["copies", "sockets"])
def test_the_next_group_is_gathered_after_all_gradient_buckets_but_the_last(transport: Environment) -> None:
    run_ranks(gather_after_a_grad_bucket, 2, environment=transport)


def find_first_reduction(group: str, events: list[str]) -> int:
    return events.index(f"reduce {group}")


def choose_the_next_group() -> None:
    model = towers()
    model[2].set_modules_to_backward_prefetch([model[1]])
    events = record_backward(model)
    assert events.index("unshard 1") < find_first_reduction("2", events)
    assert events.index("unshard 0") > find_first_reduction("1", events), (
        "without a prefetch list the gather follows the reduction"
    )


def freeze_part() -> None:
    model = towers(ready=False)
    model[2].floors[0].bias.requires_grad_(False)
    play(model, 0, dist.get_rank())
    events = record_backward(model)
    assert events.index("unshard 1") < find_first_reduction("2", events)


def accumulate() -> None:
    model = towers()
    model.set_requires_gradient_sync(False)
    assert record_backward(model) == ["unshard 2", "unshard 1", "wait 2", "wait 1", "unshard 0", "wait 0"]
    model.set_requires_gradient_sync(True)
    events = record_backward(model)
    assert events.index("unshard 1") > find_first_reduction("2", events)


def share_memory() -> None:
    """Check shared-memory shards: the full parameters use no memory that gradients could use."""
    events = record_backward(towers())
    assert events.index("unshard 1") < find_first_reduction("2", events)


def bound_unsharded_bytes() -> None:
    model = towers()
    model.set_max_unsharded_bytes(0)
    events = record_backward(model)
    assert events.index("unshard 1") > max(i for i, event in enumerate(events) if event == "reduce 2")


def bound_several() -> None:
    """Wait for gradient buckets with several groups. Each of these groups alone would fit into the bound."""
    model = towers(4)
    model.set_prefetch_limit(3)
    model.set_max_unsharded_bytes(2 * state_of(model[0]).group.plan.unsharded_bytes)
    loss = model(batch(1, dist.get_rank())).square().mean()
    with Recorder() as recorder:
        loss.backward()
    assert recorder.peak_groups == 2


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize(
    ("case", "transport"),
    [
        (choose_the_next_group, SOCKETS),
        (freeze_part, SOCKETS),
        (accumulate, SOCKETS),
        (share_memory, TRANSPORTS["in common"]),
        (bound_unsharded_bytes, SOCKETS),
        (bound_several, SOCKETS),
    ],
)
def test_explicit_prefetches_do_not_wait_for_gradient_buckets(case: Callable[[], None], transport: Environment) -> None:
    run_ranks(case, 2, environment=transport)


class Around(nn.Module):
    """Runs large layers before and after another one. ``outer`` is the number of outer layers: one runs twice."""

    def __init__(self, outer: int) -> None:
        super().__init__()
        self.outer = nn.ModuleList([Tower() for _ in range(outer)])
        self.first, self.between = Tower(), Tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer[-1](self.between(self.outer[0](self.first(x))))
        return out


def run_a_group_twice(outer: int, ahead: str) -> None:
    model = Around(outer)
    fully_shard(list(model.outer))
    for layer in (model.first, model.between):
        fully_shard(layer)
    fully_shard(model)
    play(model, 0, dist.get_rank())
    events = record_backward(model)
    assert events[1] == f"unshard {ahead}", "its gradients are complete only after both runs"


@pytest.mark.parametrize(("outer", "ahead"), [(1, "between"), (2, "first")], ids=["one module", "a list"])
def test_a_group_with_a_second_backward_does_not_delay_the_next_gather(outer: int, ahead: str) -> None:
    run_ranks(run_a_group_twice, 2, outer, ahead, environment=SOCKETS)


class FromInputs(nn.Module):
    """The inputs of the last layer need no gradient, so no hook shows the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Tower(), Tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x) + self.last(x)
        return out


def end_backward_without_hook() -> None:
    model = FromInputs()
    for layer in (model.first, model.last):
        fully_shard(layer)
    fully_shard(model)
    play(model, 0, dist.get_rank())
    events = record_backward(model)
    assert events.index("unshard first") < find_first_reduction("last", events)


def test_gathers_do_not_wait_for_gradient_buckets_reduced_at_the_end_of_backward() -> None:
    run_ranks(end_backward_without_hook, 2, environment=SOCKETS)


class Apart(Tower):
    """Detaches its inputs, so backward does not reach them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


class Beside(nn.Module):
    """Adds the output of a second layer whose gradients are complete only at the end of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.apart = Tower(), Apart()
        self.apart.used = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = x + self.apart(x)
        return out


def reduce_grad_buckets_at_the_end() -> None:
    model = Beside()
    fully_shard(model.first)
    fully_shard(model.apart)
    fully_shard(model)
    play(model, 0, dist.get_rank())
    events = record_backward(model)
    assert events.index("wait first") < find_first_reduction("apart", events)
    assert events.count("unshard first") == 1, "the last bucket must not trigger a second gather"


def test_gradient_buckets_reduced_at_the_end_of_backward_are_followed_by_no_gather() -> None:
    run_ranks(reduce_grad_buckets_at_the_end, 2, environment=SOCKETS)


ROUTES = {"all": [0, 1, 2, 3], "not the first batch": [0, 1, 2], "not the third": [0, 2, 3], "not the last": [1, 2, 3]}


def use_different_parameters(route: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = towers(), nn.Sequential(*(Tower() for _ in range(3)))

    def follow_route(blocks: Any, of_rank: int) -> None:
        for block in blocks:
            block.used = ROUTES[route if of_rank == 1 else "all"]

    expected: dict[str, torch.Tensor] = {}
    for other in range(size):
        reference.zero_grad()
        follow_route(reference, other)
        play(reference, 1, other)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, torch.zeros_like(parameter)) + parameter.grad / size
    follow_route(model, rank)
    with Recorder() as recorder:
        play(model, 1, rank)
    own = [event.group for event in recorder if event.operation is Operation.COLLECTIVE]
    everyones = [own] * size
    dist.all_gather_object(everyones, own)
    assert all(others == own for others in everyones)
    backward = [label for label in own if not label.endswith("in forward")]
    between = backward.index("all-gather of 1 in backward")
    assert backward[between - GRAD_BUCKETS + 1 : between + 2].count("reduce-scatter of 2") == GRAD_BUCKETS
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("transport", [COPIES, SOCKETS], ids=["copies", "sockets"])
def test_ranks_with_different_used_parameters_gather_the_next_group_at_the_same_event(
    route: str, transport: Environment
) -> None:
    run_ranks(use_different_parameters, 2, route, environment=transport)


@pytest.mark.behaviour("C-03")
def test_the_next_group_and_most_gradients_are_not_in_memory_together() -> None:
    """Check the peak: two unsharded groups, one gradient bucket, and the gradient shards so far."""
    ranks, number = 4, 5
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = towers(number, ready=False)
        full_bytes = sum(4 * parameter.numel() for parameter in model[0].parameters())
        peak = peak_above_idle(model, torch.zeros(1, WIDTH))
    finally:
        dist.destroy_process_group()
    gradient_shards = (number - 1) * full_bytes // ranks
    grad_bucket_bytes = full_bytes // GRAD_BUCKETS
    assert 0 <= peak - 2 * full_bytes - gradient_shards - grad_bucket_bytes <= grad_bucket_bytes // 4, (
        "only activations use more"
    )


def fail_while_a_gather_waits() -> None:
    """Fail in backward before the gradient bucket that the next group waits for, then reset.

    The next backward must not find the waiting all-gather.
    """
    model = towers(3)
    root = state_of(model)
    runner = iteration_of(root)._runner
    seen = []

    def fail(_: torch.Tensor) -> None:
        seen.append(runner._delayed)
        raise ArithmeticError("raised in a hook")

    last = state_of(model[2]).group.parameters[-1]
    handle = last.unsharded.register_hook(fail)
    with pytest.raises(ArithmeticError, match="raised in a hook"):
        play(model, 0, dist.get_rank())
    handle.remove()
    assert seen[0] is not None
    model.reset_iter_state()
    assert runner._delayed is None


@pytest.mark.behaviour("H-01")
def test_a_reset_drops_gathers_that_wait_for_a_gradient_bucket() -> None:
    run_ranks(fail_while_a_gather_waits, 2, environment=COPIES)


def run_alone_and_in_model() -> None:
    """Run a layer as its own root, then inside the model that renames it, with one backward through both outputs."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(740, 740), nn.Tanh(), nn.Linear(740, 740)) for _ in range(2)))
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert [len(state_of(layer).group.plan.grad_buckets) for layer in model] == [2, 2]
    x = torch.randn(2, 740, requires_grad=True)
    for each in (model, reference):
        (each[1](x).sum() + each(x).sum()).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@pytest.mark.behaviour("C-04")
def test_a_layer_that_ran_before_its_model_is_named_by_its_path() -> None:
    run_ranks(run_alone_and_in_model, 1)
