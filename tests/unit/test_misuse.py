"""What is done to a sharded model that must not be done: what the error says, or that it is honoured."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import (
    ConfigurationError,
    LifecycleError,
    ParameterError,
    fully_shard,
    register_fsdp_forward_method,
    rekey_optimizer,
)
from composable_fsdp.bypass import explanation_of
from tests.ranks._sharding import single_rank

X = torch.ones(2, 4)


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with single_rank():
        yield


class Encoder(nn.Module):
    """Computes in ``forward`` and in another method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.pause: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pause()
        return self.encode(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out

    def refuse(self) -> None:
        raise RuntimeError("a reason of its own")


def build() -> Any:
    model: Any = nn.Sequential(Encoder(), nn.Tanh(), Encoder())
    fully_shard(model[0])
    return fully_shard(model)


# -- calls that bypass the module's own


@pytest.mark.behaviour("H-02", "C-08")
@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a forward"])
def test_a_method_that_bypasses_forward_is_named_with_the_way_out(ran: bool) -> None:
    model = build()
    if ran:
        model(X).sum().backward()
    encoder = model[0]
    match = (
        r"^encode\(\) of Encoder computed with parameters that are sharded, such as 'linear\.weight'.*"
        r"register_fsdp_forward_method\(module, 'encode'\).*module\.unshard\(\)"
    )
    with pytest.raises(LifecycleError, match=match):
        encoder.encode(X)
    register_fsdp_forward_method(encoder, "encode")
    encoder.encode(X).sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())


def explanation(compute: Callable[[], object]) -> str | None:
    with pytest.raises(RuntimeError) as caught:
        compute()
    return explanation_of(caught.value)


def weighted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@pytest.mark.behaviour("H-02")
@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a forward"])
def test_of_a_plain_module_in_a_sharded_one_the_sharded_parameter_is_named(ran: bool) -> None:
    model = build()
    if ran:
        model(X).sum().backward()
    linear, group = model[0].linear, "'0' (Encoder)" if ran else "'Encoder' (Encoder)"
    remedy = (
        f" is sharded, being in the group of {group}: only calls of that module bring it into memory. Call that module;"
    )
    text = explanation(lambda: linear(X))
    assert text is not None
    assert text.startswith(f"parameter 'weight' of this Linear{remedy}")
    text = explanation(lambda: weighted(X, linear.weight))
    assert text is not None
    assert text.startswith(f"parameter 'linear.weight'{remedy}")
    assert explanation(model[0].refuse) is None


UNCAUGHT = """
import torch, torch.distributed as dist
from composable_fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4)))
model[0](torch.ones(1, 4))
"""


@pytest.mark.behaviour("H-02")
def test_an_error_that_ends_the_program_has_the_explanation() -> None:
    ended = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    mixed, told = ended.stderr.index("got mixed torch.Tensor and DTensor"), ended.stderr.index("parameter 'weight' of")
    assert mixed < told, ended.stderr


def test_other_errors_of_methods_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^a reason of its own$"):
        build()[0].refuse()


def test_methods_stay_what_they_are_to_who_looks_at_them() -> None:
    encoder = build()[0]
    assert encoder.encode.__name__ == "encode"
    assert encoder.encode.__doc__ == Encoder.encode.__doc__
    assert type(encoder).encode.__wrapped__ is Encoder.encode


@pytest.mark.behaviour("H-02")
def test_a_sharded_child_may_run_before_its_root() -> None:
    model = build()
    model[0](X).sum().backward()
    model(X).sum().backward()
    assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())


# -- optimizers


@pytest.mark.behaviour("H-02")
def test_an_optimizer_that_was_made_too_early_is_refused_and_can_be_given_the_sharded_parameters() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fully_shard(model[1])
    fully_shard(model)
    model(X).sum().backward()
    match = (
        r"^Adam was built before fully_shard: 4 of its 4 parameters have been replaced by sharded ones, such as "
        r"'0\.weight' of Sequential, .*composable_fsdp\.rekey_optimizer\(optimizer, model\)\.$"
    )
    with pytest.raises(ConfigurationError, match=match):
        optimizer.step()
    rekey_optimizer(optimizer, model)
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))


# -- parameters that are changed


@pytest.mark.behaviour("H-02")
@pytest.mark.parametrize("when", ["before a forward", "between forward and backward", "after a step"])
def test_a_replaced_parameter_is_named(when: str) -> None:
    model = build()
    pending: list[torch.Tensor] = []
    if when == "between forward and backward":
        pending.append(model(X).sum())
    if when == "after a step":
        model(X).sum().backward()
    model[2].linear.weight = nn.Parameter(torch.zeros(4, 4))
    for loss in pending:
        loss.backward()
    match = r"parameter '2\.linear\.weight' was replaced after sharding by a Parameter.*Change it in place"
    with pytest.raises(ParameterError, match=match):
        model(X)


@pytest.mark.behaviour("H-02")
def test_a_parameter_replaced_before_backward_gathers_its_group_is_named_there() -> None:
    model = build()
    loss = model(X).sum()
    model[0].linear.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ParameterError, match=r"parameter 'linear\.weight' was replaced after sharding by a Parameter"):
        loss.backward()


@pytest.mark.behaviour("H-06")
@pytest.mark.parametrize("foreach", [False, True])
def test_a_change_between_forward_and_backward_is_found_when_asked_for(foreach: bool) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=foreach)
    model.set_version_check(True)
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
    loss = model(X).sum()
    optimizer.step()
    match = (
        r"parameters of 'root' were changed between forward and backward: \['2\.linear\.weight', '2\.linear\.bias'\]"
    )
    with pytest.raises(LifecycleError, match=match):
        loss.backward()
    model.reset_iter_state()
    model.set_version_check(False)
    loss = model(X).sum()
    optimizer.step()
    loss.backward()


@pytest.mark.behaviour("H-06")
def test_data_of_another_tensor_are_found_when_asked_for() -> None:
    model = build()
    model.set_version_check(True)
    for convert in (lambda: model.to(torch.float64), lambda: model.to(torch.float32)):
        convert()
        model(X.to(next(model.parameters()).dtype)).sum().backward()  # conversions are followed
    weight = model.get_parameter("0.linear.weight")
    weight.data = torch.zeros_like(weight)
    match = r"parameter 'linear\.weight' of '0' was given other values with p\.data = \.\.\..*Change it in place"
    with pytest.raises(ParameterError, match=match):
        model(X)


# -- two threads


@pytest.mark.behaviour("H-06")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_of_two_threads_in_one_model_the_second_is_refused_and_the_first_goes_on(where: str) -> None:
    model = build()
    reached, go_on = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        if threading.current_thread().name == "other":
            reached.set()
            assert go_on.wait(30)

    if where == "forward":
        model[0].pause = pause
    else:
        model[1].register_forward_hook(lambda module, args, output: output.register_hook(pause) and None)
    failures: list[BaseException] = []

    def train() -> None:
        try:
            model(X).sum().backward()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train, name="other")
    thread.start()
    assert reached.wait(30)
    match = (
        rf"thread 'MainThread' began a forward of 'root' while thread 'other' is inside the {where} of 'root'\. "
        "A sharded model is not re-entrant"
    )
    try:
        with pytest.raises(LifecycleError, match=match):
            model(X)
    finally:
        go_on.set()
        thread.join(30)
    assert not failures
    assert all(p.grad is not None for p in model.parameters())
    model(X).sum().backward()
