"""Steps whose events or groups differ from those that were planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests._internals import ForwardRecord, GroupReduction, ParamGroup, StreamLauncher, schedule, state_of
from tests.helpers.sharding import fake_ranks

RANKS, WIDTH = 4, 512
LAYER_BYTES = WIDTH * WIDTH * 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(RANKS):
        yield init_device_mesh("cpu", (RANKS,))


def peak_of(step: Callable[[], object]) -> int:
    held = peak = 0
    with Recorder() as recorder:
        step()
    for event in recorder:
        if event.operation in (Operation.ALLOCATE, Operation.FREE):
            held += event.bytes if event.operation is Operation.ALLOCATE else -event.bytes
            peak = max(peak, held)
    return peak


def train(model: nn.Module, *inputs: object) -> None:
    model(*inputs).sum().backward()


def layers(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


class Chain(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(count))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


@pytest.mark.filterwarnings("ignore:Forward order differs")
def test_a_changed_order_keeps_the_bound_on_unsharded_bytes(mesh: DeviceMesh) -> None:
    model = Chain(6)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_schedule(max_unsharded_bytes=2 * LAYER_BYTES)  # type: ignore[operator]
    x = torch.ones(1, WIDTH)
    for order in (range(6), range(6), (0, 2, 4, 5), (1, 3, 0, 5, 2), (5, 0, 2), range(6)):
        assert peak_of(partial(train, model, x, order)) <= 2 * LAYER_BYTES, order


def test_a_group_counts_in_the_bound_between_its_modules(mesh: DeviceMesh) -> None:
    model = Chain(6)
    for layer in model.layers[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.layers[0], model.layers[-1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_schedule(max_unsharded_bytes=3 * LAYER_BYTES)  # type: ignore[operator]
    for _ in range(3):
        assert peak_of(partial(train, model, torch.ones(1, WIDTH), range(6))) <= 3 * LAYER_BYTES


class Flaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *, fails: bool) -> torch.Tensor:
        if fails:
            raise ArithmeticError
        return self.layer(x)


class Retrying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flaky, self.last = Flaky(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.flaky(x, fails=True)
        except ArithmeticError:
            x = self.flaky(x, fails=False)
        return self.last(x)


def test_a_module_that_runs_again_after_an_error_is_freed(mesh: DeviceMesh) -> None:
    model = Retrying()
    fully_shard(model.flaky, mesh=mesh)
    fully_shard(model.last, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad(), Recorder() as recorder:
        model(x)
    in_memory = [
        e.operation for e in recorder if e.group == "flaky" and e.operation in (Operation.WAIT, Operation.RESHARD)
    ]
    assert in_memory[-1] is Operation.RESHARD, "kept parameters would miss the optimizer step"


class RetryingGather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except MemoryError:
            x = self.first(x)
        return self.last(x)


def test_a_module_whose_gather_raised_has_one_run_in_the_plan(mesh: DeviceMesh, monkeypatch) -> None:
    """Else ranks without the error would have another plan."""
    model = RetryingGather()
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=mesh)
    train(model, torch.ones(1, WIDTH))
    root = state_of(model).root
    runs, wait = list(root.planner.last_known.events), root.launcher.wait

    def fail_once(group: ParamGroup) -> None:
        if group.name == "first":
            monkeypatch.undo()
            raise MemoryError
        wait(group)

    monkeypatch.setattr(root.launcher, "wait", fail_once)
    train(model, torch.ones(1, WIDTH))
    assert root.launcher.wait == wait, "the gather has not raised"
    assert root.planner.last_known.events == runs


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(RANKS, RANKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.parametrize("change", ["step", "write"])
def test_kept_parameters_of_another_root_are_gathered_again_after_a_change(mesh: DeviceMesh, change: str) -> None:
    """The head alone runs, in evaluation: no forward of the embedding's root asks whether its parameters are stale."""
    embedding, head = Embedding(), Embedding()
    head.weight = embedding.weight
    fully_shard(embedding, mesh=mesh, reshard_after_forward=False)
    fully_shard(head, mesh=mesh, shared_from=[embedding])
    (weight,) = embedding.parameters()
    optimizer, x = torch.optim.SGD([weight], lr=1.0), torch.ones(1, RANKS)
    with torch.no_grad(), Recorder() as recorder:
        head(x)
        head(x)
        if change == "step":
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        else:
            weight.zero_()
        assert float(head(x)[0, 0]) == 0, "this rank's row is zero now, and stands for all in a group of fake ranks"
        head(x)
    gathers = [event for event in recorder if event.operation is Operation.UNSHARD and event.bytes]
    assert len(gathers) == 2, "fresh ones are used as they are"


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Chain(3), Chain(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x, range(3)), range(3))


def test_parts_that_are_called_one_after_the_other_are_prefetched_by_orders_of_their_own(mesh: DeviceMesh) -> None:
    model: Any = Parts()
    for part in (model.encoder, model.decoder):
        for module in (*part.layers, part):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_schedule(max_fused_bytes=0)
    train(model, torch.ones(1, WIDTH))  # makes the root of both

    def parts() -> list[str]:
        hidden = model.encoder(torch.ones(1, WIDTH), range(3))
        return unsharded_in(lambda: model.decoder(hidden, range(3)).sum().backward())

    parts()  # records the orders
    seen = parts()
    assert seen.index("unshard decoder.layers.1") < seen.index("wait decoder.layers.0"), seen


def unsharded_in(step: Callable[[], object]) -> list[str]:
    with Recorder() as recorder:
        step()
    return [str(event) for event in recorder if event.operation in (Operation.UNSHARD, Operation.WAIT)]


@pytest.mark.parametrize("owner_is_root", [False, True])
def test_an_owner_below_another_root_is_unsharded_for_its_user(mesh: DeviceMesh, *, owner_is_root: bool) -> None:
    owner, user = layers(2)
    user.weight = owner.weight
    fully_shard(owner, mesh=mesh)
    fully_shard(user, mesh=mesh, shared_from=[owner])
    x = torch.ones(1, WIDTH)
    if owner_is_root:  # both groups are then named "root"
        owner(x).sum().backward()
    gathers = unsharded_in(lambda: user(x))
    assert len(gathers) == 4, "both groups must be gathered"
    user.reset_iter_state()  # type: ignore[operator]


@pytest.mark.parametrize("trainable", [False, True])
def test_an_owner_below_another_root_is_freed_after_backward(mesh: DeviceMesh, *, trainable: bool) -> None:
    """Also one without gradients, of which its own root hears nothing."""
    owner, user = layers(2)
    owner.requires_grad_(trainable)
    user.weight, user.bias = owner.weight, nn.Parameter(torch.zeros(WIDTH))
    fully_shard(owner, mesh=mesh)
    fully_shard(user, mesh=mesh, shared_from=[owner])
    x = torch.ones(1, WIDTH)
    owner(x)
    for _ in range(2):
        train(user, x.requires_grad_())
        assert not state_of(owner).group.unshard_started


def test_groups_of_another_root_are_not_prefetched(mesh: DeviceMesh) -> None:
    first, second = Chain(2), Chain(2)
    for part in (first, second):
        for layer in part.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(part, mesh=mesh)
    first.layers[1].set_modules_to_forward_prefetch([second.layers[0]])  # type: ignore[operator]
    x = torch.ones(1, WIDTH)
    for part in (first, second):
        part(x, range(2)).sum().backward()  # the first forward names the groups
    for part in (first, second):
        found = unsharded_in(lambda part=part: part(x, range(2)))  # type: ignore[misc]
        assert sorted(found) == sorted(f"{verb} {name}" for verb in ("unshard", "wait") for name in names_of(part))


def names_of(part: Chain) -> list[str]:
    return ["root", *(f"layers.{i}" for i in range(len(part.layers)))]


def test_a_root_does_not_keep_alive_what_it_was_told_to_prefetch_of_another(mesh: DeviceMesh) -> None:
    first, second = Chain(1), Chain(1)
    for part in (first, second):
        fully_shard(part.layers[0], mesh=mesh)
        fully_shard(part, mesh=mesh)
    first.layers[0].set_modules_to_forward_prefetch([second.layers[0]])  # type: ignore[operator]
    x = torch.ones(1, WIDTH)
    for part in (first, second, first):
        part(x, range(1)).sum().backward()
    known = ref(second.layers[0])
    del second, part
    assert known() is None
    assert len(unsharded_in(lambda: first(x, range(1)))) == 4


class WithForce(nn.Module):
    """A model whose forward differentiates one of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.layers[1](self.layers[0](x))
        (force,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return self.layers[3](self.layers[2](energy + force))


def test_a_backward_inside_the_forward_leaves_a_complete_plan(mesh: DeviceMesh) -> None:
    model = WithForce()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_schedule(max_fused_bytes=0)  # type: ignore[operator]
    for _ in range(2):
        train(model, torch.ones(1, WIDTH, requires_grad=True))
    found = unsharded_in(lambda: model(torch.ones(1, WIDTH, requires_grad=True)))
    assert found[-2:] == ["wait layers.2", "wait layers.3"], "the last group is prefetched"


class AroundInputs(nn.Module):
    """A backward inside the forward gives gradients of inputs. The group around it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.own(x)
        (force,) = torch.autograd.grad(self.inner(h).square().sum(), h, create_graph=True)
        return self.own(force)


class BetweenModules(nn.Module):
    """A backward between the two modules of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        (force,) = torch.autograd.grad(self.first(h).square().sum(), h, create_graph=True)
        return self.last(force)


class AroundAll(nn.Linear):
    """A backward inside the forward gives the gradients of all parameters of the module that runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x.detach()).sum().backward()
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (AroundInputs(), [["inner"]]),
        (BetweenModules(), [["first", "last"]]),
        (AroundAll(WIDTH, WIDTH), []),
    ],
    ids=["gradients of inputs", "between modules", "gradients of all"],
)
def test_a_backward_inside_a_forward_frees_nothing_that_it_goes_on_to_use(
    model: nn.Module, groups: Sequence[Sequence[str]]
) -> None:
    alike = deepcopy(model)
    with fake_ranks(1):
        mesh = init_device_mesh("cpu", (1,))
        for group in groups:
            fully_shard([model.get_submodule(name) for name in group], mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            x = torch.randn(2, WIDTH, requires_grad=True)
            found, expected = model(x), alike(x)
            torch.testing.assert_close(found, expected)
            found.sum().backward()
            expected.sum().backward()
            for parameter, plain in zip(model.parameters(), alike.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]
        assert not [s for s in state_of(model).root.states.values() if s.group.unshard_started], "freed at the end"


class AroundThread(AroundInputs):
    """The backward inside the forward runs in another thread, as autograd's does on accelerators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        thread = Thread(target=h.sum().backward, kwargs={"inputs": [x], "retain_graph": True})
        thread.start()
        thread.join(30)
        return self.own(self.inner(h))


def test_a_forward_goes_on_in_its_thread_after_a_backward_in_another(mesh: DeviceMesh) -> None:
    model = AroundThread()
    for module in (model.inner, model.own, model):
        fully_shard(module, mesh=mesh)
    for _ in range(2):
        train(model, torch.ones(1, WIDTH, requires_grad=True))


class User(nn.Module):
    """A module that uses the weight of ``owner``, and calls ``owner``, which raises, or raises itself."""

    def __init__(self, owner: nn.Linear, raises: str) -> None:
        super().__init__()
        self.weight, self.own, self.raises = owner.weight, nn.Linear(WIDTH, WIDTH, bias=False), raises
        self.others = [owner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises == "user":
            raise RuntimeError
        with suppress(RuntimeError):
            self.others[0](x[:, :1])
        return self.own(x) @ self.weight


class Catching(nn.Module):
    def __init__(self, raises: str) -> None:
        super().__init__()
        (self.owner,) = layers(1)
        self.user = User(self.owner, raises)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(RuntimeError):
            x = self.user(x)
        return x


@pytest.mark.parametrize("has_one_root", [True, False])
@pytest.mark.parametrize("raises", ["user", "owner"])
def test_a_forward_that_raised_frees_what_it_shares_but_nothing_in_use(
    mesh: DeviceMesh, raises: str, *, has_one_root: bool
) -> None:
    """Parameters that stay would miss the optimizer step."""
    model = Catching(raises)
    fully_shard(model.owner, mesh=mesh)
    fully_shard(model.user, mesh=mesh, shared_from=[model.owner])
    x = torch.ones(1, WIDTH)
    if has_one_root:
        fully_shard(model, mesh=mesh)
    else:
        model.owner(x).sum().backward()
    for _ in range(2):
        with torch.no_grad():
            assert (model(x) is x) == (raises == "user"), "the user has gone on"
        assert not any(state_of(module).group.unshard_started for module in (model.owner, model.user))


def accumulate(model: nn.Module, sync: Sequence[bool]) -> None:
    for last in sync:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        train(model, torch.ones(1, WIDTH), range(3))


def test_accumulation_makes_its_plans_once(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(3)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    made: list[schedule.Limits] = []
    make_plan = schedule.make_plan

    def counted(
        record: ForwardRecord, facts: schedule.Facts, limits: schedule.Limits, fused: schedule.Fusions | None
    ) -> schedule.Plan:
        made.append(limits)
        return make_plan(record, facts, limits, fused)

    monkeypatch.setattr(schedule, "make_plan", counted)
    accumulate(model, [False, True] * 3)
    assert made
    made.clear()
    accumulate(model, [False, True] * 2)
    assert not made, "the plans of both microbatches are kept"
    model.set_schedule(prefetch_limit=0)  # type: ignore[operator]
    accumulate(model, [True, True])
    assert {limits.prefetch for limits in made} == {0}, "another option has a plan of its own"
    made.clear()
    accumulate(model, [True])
    model.set_schedule(prefetch_limit=0)  # type: ignore[operator]
    accumulate(model, [True])
    assert not made, "a setting that keeps its value changes nothing"
    model.set_schedule(prefetch_limit=1)  # type: ignore[operator]
    accumulate(model, [False, True] * 2)
    assert not made, "an earlier option has its plan again"


class SometimesCheckpointed(nn.Sequential):
    checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self
        x = first(x)
        return third(checkpoint(second, x, use_reentrant=True) if self.checkpoints else second(x))


def test_a_reentrant_checkpoint_ends_fusions_in_its_own_backward_only(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reduce = SometimesCheckpointed(*(nn.Linear(8, 8) for _ in range(3))), StreamLauncher.reduce
    launched: list[int] = []

    def reduce_and_note(_: StreamLauncher, reduction: GroupReduction) -> None:
        launched.append(len(reduction.members))
        reduce(reduction)

    monkeypatch.setattr(StreamLauncher, "reduce", reduce_and_note)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for checkpoints, expected in ((False, [3]), (True, [1, 1, 1]), (True, [1, 1, 1]), (False, [3])):
        model.checkpoints = checkpoints
        train(model, torch.ones(1, 8, requires_grad=True))  # notes the order
        launched.clear()
        train(model, torch.ones(1, 8, requires_grad=True))
        assert launched == expected, checkpoints
