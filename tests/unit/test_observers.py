"""Observers are told of the events of a root, and the lists of plugins say what is attached."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard, plugins
from composable_fsdp.errors import LifecycleError
from composable_fsdp.plugins import OBSERVERS, Observer
from tests._internals import root_of, state_of
from tests.plugin_table import LISTED, PROJECT, listed, without

pytestmark = pytest.mark.usefixtures("one_rank")


class Log(Observer):
    """Writes down the events of all roots."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def after_sharding(self, state: Any, modules: Any) -> None:
        self.lines.append(f"sharded {len(state.group.parameters)} parameters")

    def before_first_collective(self, root: Any) -> None:
        self.lines.append("first collective")

    def begin_pass(self, root: Any, which: Any) -> None:
        self.lines.append(f"begin {which.value}")

    def end_pass(self, root: Any, which: Any, succeeded: bool) -> None:
        self.lines.append(f"end {which.value}{'' if succeeded else ' without success'}")

    def enter_forward(self, root: Any, call: Any) -> None:
        self.lines.append(f"forward of {call.name}")

    def enter_backward(self, root: Any, call: Any) -> None:
        self.lines.append(f"backward of {call.name}")

    def raised(self, root: Any, call: Any, error: BaseException) -> None:
        self.lines.append(f"{call.name} raised {error}")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.lines.append(f"step of {type(optimizer).__name__}")

    def after_reset(self, root: Any) -> None:
        self.lines.append("reset")


@pytest.fixture
def attach() -> Iterator[Callable[[Observer], Observer]]:
    before = OBSERVERS.copy()

    def attached(observer: Observer) -> Observer:
        OBSERVERS.append(observer)
        return observer

    yield attached
    OBSERVERS[:] = before


def test_an_observer_is_told_of_the_events_of_a_step(attach: Callable[[Observer], Observer]) -> None:
    log = Log()
    attach(log)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert log.lines == [
        *("sharded 2 parameters", "sharded 1 parameters", "sharded 0 parameters"),
        *("begin forward", "first collective", "forward of root", "forward of 0", "forward of 1", "end forward"),
        *("begin backward", "backward of 1", "backward of root", "backward of 0", "end backward"),
        "step of SGD",
    ]


def test_an_observer_is_told_of_a_failed_pass(attach: Callable[[Observer], Observer]) -> None:
    log = Log()
    attach(log)
    model: Any = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    model.reset_iter_state()
    failure = log.lines[4]
    assert re.match(r"root raised (addmm: )?mat1 and mat2 shapes cannot be multiplied", failure), failure
    assert log.lines[5:] == ["end forward without success", "reset"]


class LastWork(Log):
    """Also writes down the end of passes, and lets them wait for work, which fails in those of the kind ``fails``."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self._fails, self._which = fails, ""

    def end_forward(self, root: Any) -> None:
        self.lines.append("forward has run")

    def end_backward(self, root: Any) -> None:
        self.lines.append("backward has run")

    def before_end(self, root: Any, which: Any) -> Any:
        self._which = which.value
        self.lines.append(f"last work of {self._which}")
        return [self]

    def wait(self) -> None:
        self.lines.append(f"wait for {self._which}")
        if self._which == self._fails:
            raise TimeoutError("a rank is gone")


@pytest.mark.parametrize("fails", ["", "forward", "backward"])
def test_a_pass_succeeds_only_after_its_last_work(fails: str, attach: Callable[[Observer], Observer]) -> None:
    log = LastWork(fails)
    attach(log)
    model: Any = nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4)))
    fully_shard(model)
    expected = []
    for kind in ("forward", "backward"):
        expected += [f"begin {kind}", f"{kind} has run", f"last work of {kind}", f"wait for {kind}"]
        if kind == fails:
            break
        expected.append(f"end {kind}")
    if not fails:
        model(torch.ones(2, 4)).sum().backward()
    else:
        with pytest.raises(TimeoutError, match="a rank is gone"):
            model(torch.ones(2, 4)).sum().backward()
        if fails == "backward":
            with pytest.raises(LifecycleError, match=r"last backward pass .* has not ended.*reset_iter_state"):
                model(torch.ones(2, 4))
        model.reset_iter_state()
        expected += [f"end {fails} without success", "reset"]
    assert [line for line in log.lines if re.match("begin|end|last|wait|reset|.* has run", line)] == expected
    log._fails = ""
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Named(Observer):
    """Writes its name at the beginning and at the end of each hook."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self._name, self._lines = name, lines

    def before_hook(self, root: Any, hook: Any, subject: Any) -> None:
        self._lines.append(f"{self._name} begins {hook.value}")

    def after_hook(self, root: Any, hook: Any, subject: Any) -> None:
        self._lines.append(f"{self._name} ends {hook.value}")


def test_observers_of_a_beginning_are_told_in_order_and_those_of_an_end_in_reverse() -> None:
    lines: list[str] = []
    model = fully_shard(nn.Linear(4, 4))
    root = root_of(state_of(model))
    one, other = Named("one", lines), Named("other", lines)
    with torch.no_grad():
        model(torch.ones(2, 4))
    before = root.observers.before_hook, root.observers.after_hook
    for observer in (one, other, one):
        root.observers.add(observer)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert lines[:2] == ["one begins pre-forward", "other begins pre-forward"]
    assert lines[2:4] == ["other ends pre-forward", "one ends pre-forward"]
    root.observers.remove(one)
    lines.clear()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert lines[:2] == ["other begins pre-forward", "other ends pre-forward"]
    root.observers.remove(other)
    assert (root.observers.before_hook, root.observers.after_hook) == before, (
        "an event that nobody observes costs one truth test"
    )


def test_an_observer_may_be_another_one_for_each_root_or_none(attach: Callable[[Observer], Observer]) -> None:
    class OfSome(Observer):
        def for_root(self, root: Any) -> Observer | None:
            return Log() if root.root_state.group.parameters else None

    attach(OfSome())
    roots = [root_of(state_of(fully_shard(module))) for module in (nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))]
    logs = [[each for each in root.observers.attached if isinstance(each, Log)] for root in roots]
    assert [len(each) for each in logs] == [1, 0, 1]
    assert logs[0][0] is not logs[2][0]


def test_a_method_with_nearly_the_name_of_an_event_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Typo.begin_forwards observes no event\. Did you mean begin_forward\?$"):
        type("Typo", (Observer,), {"begin_forwards": lambda self, root, outermost: None})
    text = r"^Hooks.post_backward observes no event\. Override before_hook or after_hook\.$"
    with pytest.raises(TypeError, match=text):
        type("Hooks", (Observer,), {"post_backward": lambda self, root, call: None})
    type("Helper", (Observer,), {"report": lambda self: None, "_begin_forwards": lambda self: None})


def test_observers_are_told_that_a_call_leaves_backward_before_its_reduction(attach) -> None:
    class Ends(Observer):
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool]] = []

        def before_hook(self, root: Any, hook: Any, subject: Any) -> None:
            if hook is plugins.Hook.POST_BACKWARD:
                parameters = subject.state.group.parameters
                self.seen.append((subject.name, all(p.sharded.grad is None for p in parameters)))

    ends = Ends()
    attach(ends)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert [name for name, _ in ends.seen if name != "root"] == ["1", "0"]
    assert all(is_before for _, is_before in ends.seen)


def test_the_table_of_plugins_leaves_out_one_line_of_the_lists() -> None:
    source = (PROJECT / LISTED).read_text()
    kinds = plugins.DEFAULT_GATHER_KINDS, plugins.DEFAULT_REDUCE_KINDS
    forms = (
        plugins.DEFAULT_FORMS,
        plugins.DEFAULT_LEFT_CONTEXTS,
        plugins.DEFAULT_CLASS_MEMBERS,
        plugins.DEFAULT_HOOK_WRAPPERS,
    )
    lists = plugins.DEFAULT_TRANSPORTS, plugins.DEFAULT_AROUND, *kinds, plugins.DEFAULT, *forms
    attached: list[Any] = [*chain.from_iterable(lists)]
    assert listed(source) == [plugin.__name__ for plugin in attached]
    for plugin in listed(source):
        shorter = without(source, plugin)
        assert len(source.splitlines()) == len(shorter.splitlines()) + 1
        assert plugin not in listed(shorter)
    text = r"^there is no plugin 'Absent'\. The plugins are in_shared_memory, over_gloo, "
    with pytest.raises(SystemExit, match=text):
        without(source, "Absent")


class Ends(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def after_hook(self, root: Any, hook: Any, subject: Any) -> None:
        self.lines.append(hook.value)


def test_an_observer_of_the_ends_of_hooks_alone_is_told_of_them(attach: Callable[[Observer], Observer]) -> None:
    ends = Ends()
    attach(ends)
    model: Any = fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    assert ends.lines == [
        *("pre-forward", "end of forward", "post-forward", "pre-backward", "gradients ready", "end of backward")
    ]
