"""Invalid use of a sharded model raises an error, and supported changes take effect."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    local_optimizer,
    no_sync,
    register_fsdp_forward_method,
    unsharded_params,
)
from composable_fsdp.checkpoint import Full, state_dict, state_dict_form
from composable_fsdp.errors import (
    ArgumentTypeError,
    ConfigurationError,
    LifecycleError,
    OffloadBackendWarning,
    ParameterError,
)
from tests._internals import data_parallel_axes, explanation_of, state_of, warn_without_cpu_backend
from tests.helpers.fresh_process import run_program

pytestmark = [pytest.mark.behaviour("H-02"), pytest.mark.usefixtures("one_rank")]

X = torch.ones(2, 4)


class Encoder(nn.Module):
    """Has a second method that computes, besides ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.pause: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pause()
        return self.encode(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def refuse(self) -> None:
        raise RuntimeError("raised by the module")


def build() -> Any:
    model: Any = nn.Sequential(Encoder(), nn.Tanh(), Encoder())
    fully_shard(model[0])
    return fully_shard(model)


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a forward"])
def test_a_method_that_bypasses_forward_is_named_with_the_remedy(ran: bool) -> None:
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


@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a forward"])
def test_the_error_names_the_sharded_parameter_of_a_plain_module(ran: bool) -> None:
    model = build()
    if ran:
        model(X).sum().backward()
    linear, group = model[0].linear, "'0' (Encoder)" if ran else "'Encoder' (Encoder)"
    remedy = (
        f" is sharded, being in the group of {group}: only calls of that module bring it into memory. Call that module;"
    )
    for compute in (lambda: linear(X), lambda: weighted(X, linear.weight)):
        text = explanation(compute)
        assert text is not None
        assert text.startswith(f"parameter 'linear.weight'{remedy}")
    with pytest.raises(RuntimeError, match=r"^raised by the module$") as caught:
        model[0].refuse()
    assert explanation_of(caught.value) is None


class Whitening(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.add_(torch.eye(len(p)) @ p, alpha=-0.1)


def test_an_error_in_the_step_of_an_optimizer_names_what_gives_it_whole_matrices() -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False))
    text = explanation(Whitening(model.parameters(), {}).step)
    assert text is not None
    assert text.startswith("parameter 'weight' is sharded")
    assert "owner_step(optimizer). One that is element-wise: composable_fsdp.local_optimizer(" in text


def test_the_error_names_the_parameter_in_the_line_that_failed_though_no_local_holds_it() -> None:
    model = build()
    head = model[2].linear
    text = explanation(lambda: X @ head.bias.expand(4, 4))
    assert text is not None
    assert text.startswith("parameter '2.linear.bias' is sharded, being in the group of 'Sequential'")


def test_an_error_about_the_memory_of_a_shard_names_it_and_how_to_take_full_values() -> None:
    model = build()
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    bias = model[2].linear.bias
    writes: list[tuple[Callable[[], object], str]] = [
        (lambda: addresses(tensors), "'0.linear.weight'"),
        (lambda: bias.untyped_storage().data_ptr(), "'2.linear.bias'"),
    ]
    for write, name in writes:
        text = explanation(write)
        assert text is not None
        assert text.startswith(f"{name} is a DTensor: this rank has only a shard of it")
        assert "full_tensor()" in text
        assert "unsharded_params(model, writeback=False)" in text


def addresses(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]


class TiedHead(nn.Module):
    """Computes with the weight of ``first``, without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))  # unsharded in forward, so that no error is about it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.second(x * self.scale), self.first.weight)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.second(x * self.scale), self.first.weight)


@pytest.mark.parametrize("entry", ["__call__", "forward", "score"])
def test_an_error_in_the_forward_of_a_sharded_module_is_explained_where_it_is_caught(entry: str) -> None:
    model = TiedHead()
    for module in (model.first, model.second, model):
        fully_shard(module)
    register_fsdp_forward_method(model, "score")
    outer = fully_shard(nn.Sequential(model))
    for call in (getattr(model, entry), outer):
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as caught:
            call(X)
        text = r"\nparameter 'weight' is sharded, being in the group of '(0\.)?first' \(Linear\): only calls"
        assert len(re.findall(text, str(caught.value))) == 1


class Proxy:
    """A local of a program whose class cannot be looked up, as that of a proxy outside of its context."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise LookupError("no context")


class Failing(nn.Sequential):
    """Raises ``error`` if there is one, with a proxy in a local."""

    error: Exception | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        proxy = Proxy()
        if self.error is not None and id(proxy):
            raise self.error
        return cast(torch.Tensor, super().forward(x))


class WithoutText(Exception):
    def __str__(self) -> str:
        return str(self.args[1])


@pytest.mark.parametrize(
    "error",
    [RuntimeError("got mixed torch.Tensor and DTensor"), RuntimeError("invalid python storage"), WithoutText("once")],
    ids=["mixed", "storage", "no text"],
)
def test_an_error_that_cannot_be_explained_or_shown_ends_the_forward_as_any(error: Exception) -> None:
    model = fully_shard(Failing(nn.Linear(4, 4)))
    model.error = error
    with pytest.raises(type(error)) as caught:
        model(X)
    assert caught.value is error
    model.error = None
    model(X).sum().backward()
    assert model[0].weight.grad is not None


@dataclass
class Uncopied:
    value: torch.Tensor

    def __copy__(self) -> NoReturn:
        raise ValueError("no copies")


class ReturnsUncopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.wraps = nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> Any:
        return Uncopied(self.inner(x)) if self.wraps else self.inner(x)


@pytest.mark.behaviour("H-06")
@pytest.mark.parametrize("nested", [False, True])
def test_an_output_that_cannot_be_mapped_ends_the_forward_as_any_error(nested: bool) -> None:
    inner = fully_shard(ReturnsUncopied(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    model = fully_shard(nn.Sequential(inner, nn.Linear(4, 4, dtype=torch.bfloat16))) if nested else inner
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="no copies"):
        model(x)
    inner.wraps = False
    model(x).sum().backward()


UNCAUGHT = """
import torch, torch.distributed as dist
from composable_fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4)))
model[0](torch.ones(1, 4))
"""


@pytest.mark.multiprocess
def test_an_uncaught_error_has_the_explanation() -> None:
    ended = run_program(UNCAUGHT)
    assert ended.returncode == 1
    mixed, advice = (
        ended.stderr.index("got mixed torch.Tensor and DTensor"),
        ended.stderr.index("parameter '0.weight' is sharded"),
    )
    assert mixed < advice, ended.stderr


class Overridden(Encoder):
    """Overrides methods by what is none."""

    @staticmethod
    def encode(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def score(self) -> str:
        return "base"

    def name(self) -> str:
        return "base"

    async def wait(self) -> int:
        return 1

    def stream(self) -> Iterator[int]:
        yield 1


class Overriding(Overridden):
    @classmethod
    def score(cls) -> str:
        return cls.__name__

    @property
    def name(self) -> str:  # type: ignore[override]
        return "derived"


def test_methods_that_others_override_or_that_run_later_stay_as_they_are() -> None:
    model: Any = fully_shard(Overriding())
    assert torch.equal(model.encode(X), X + 1)
    assert (model.score(), model.name) == ("FSDPOverriding", "derived")
    assert inspect.iscoroutinefunction(model.wait)
    assert inspect.isgeneratorfunction(model.stream)


def test_wrapped_methods_keep_their_signature_and_docstring() -> None:
    encoder = build()[0]
    assert encoder.encode.__name__ == "encode"
    assert encoder.encode.__doc__ == Encoder.encode.__doc__
    assert type(encoder).encode.__wrapped__ is Encoder.encode


@pytest.mark.behaviour("H-02")
def test_an_optimizer_made_before_sharding_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fully_shard(model[1])
    fully_shard(model)
    model(X).sum().backward()
    match = (
        r"^Adam was built before fully_shard: 4 of its 4 parameters have been replaced by sharded ones, such as "
        r"'0\.weight' of Sequential, .*Build the optimizer after the last fully_shard call\.$"
    )
    with pytest.raises(ConfigurationError, match=match):
        optimizer.step()


def test_parameters_that_an_optimizer_gets_later_are_checked_too() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    early = list(model[1].parameters())
    fully_shard(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": early})
    with pytest.raises(ConfigurationError, match=r"^SGD was built before fully_shard: 2 of its 4 parameters"):
        optimizer.step()


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


def test_a_parameter_replaced_before_backward_gathers_its_group_is_named_there() -> None:
    model = build()
    loss = model(X).sum()
    model[0].linear.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ParameterError, match=r"parameter 'linear\.weight' was replaced after sharding by a Parameter"):
        loss.backward()


CHANGED = (
    r"^parameters of 'root' were changed in place between forward and backward: \['2\.linear\.weight', "
    r"'2\.linear\.bias'\]\. Their gradients would be .* call reset_iter_state\(\)"
)


@pytest.mark.behaviour("H-06")
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1.0, fused=True),
        lambda parameters: local_optimizer(torch.optim.AdamW(parameters, lr=1.0, fused=True)),
    ],
    ids=["loop", "foreach", "fused", "local"],
)
@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept unsharded"])
def test_an_optimizer_step_between_forward_and_backward_is_an_error(optimizer_of, keeps: bool) -> None:
    """Autograd also raises an error for parameters that are not sharded."""
    model = build()
    model.set_reshard_after_forward(not keeps)
    optimizer = optimizer_of(model.parameters())
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
    loss = model(X).sum()
    optimizer.step()
    with pytest.raises(LifecycleError, match=CHANGED):
        loss.backward()
    model.reset_iter_state()
    model(X).sum().backward()
    model.set_in_place_check("off")
    loss = model(X).sum()
    optimizer.step()
    loss.backward()
    with pytest.raises(ConfigurationError, match=r"^set_in_place_check takes .*, not 'all'\. .* is gone"):
        model.set_in_place_check("all")
    model.set_in_place_check("counted")
    loss = model(X).sum()
    optimizer.step()
    with pytest.raises(LifecycleError, match=CHANGED):
        loss.backward()


@pytest.mark.behaviour("H-06")
def test_an_in_place_change_between_forward_and_backward_is_named() -> None:
    model = build()
    bias = model.get_parameter("2.linear.bias")
    loss = model(X).sum()
    with torch.no_grad():
        bias.zero_()
    with pytest.raises(LifecycleError, match=r"between forward and backward: \['2\.linear\.bias'\]\."):
        loss.backward()
    model.reset_iter_state()
    loss = model(X).sum()
    bias.to_local().detach().fill_(1.0)  # increments the version of all tensors that share the memory
    with pytest.raises(LifecycleError, match=CHANGED):
        loss.backward()
    model.reset_iter_state()
    loss = model(X).sum()
    bias.to_local().data.fill_(2.0)  # does not increment the version
    loss.backward()


@pytest.mark.behaviour("H-06", "C-12")
def test_operations_allowed_between_forward_and_backward() -> None:
    """Allows all forwards, steps of other models, reads of full parameters, and steps after gradients are ready."""
    model, other = build(), build()
    steps = torch.optim.SGD(other.parameters(), lr=0.1, foreach=True)
    losses = [model(X).sum() for _ in range(2)]  # several forwards before the first backward
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)
    other(X).sum().backward()
    steps.step()
    with unsharded_params(model):
        assert all(type(p) is nn.Parameter for p in model.parameters())
    model.state_dict()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=True) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    for _ in range(2):
        model(X).sum().backward()


@pytest.mark.behaviour("H-06")
@pytest.mark.parametrize(
    "assign",
    [lambda p: torch.zeros_like(p), lambda p: torch.zeros(p.shape), lambda p: torch.zeros(0), lambda p: p.data * 0],
    ids=["DTensor", "whole", "of another shape", "computed"],
)
@pytest.mark.parametrize("when", ["before a forward", "after a step", "before backward"])
def test_assigning_data_of_another_tensor_is_an_error(assign: Callable[[Any], torch.Tensor], when: str) -> None:
    model = build()
    weight = model.get_parameter("0.linear.weight")
    if when == "after a step":
        model(X).sum().backward()
    loss = model(X).sum() if when == "before backward" else None
    weight.data = assign(weight)
    match = (
        r"^parameters \['linear\.weight'\] of '(0|Encoder)' were given other values by p\.data = \.\.\., which a "
        r"sharded parameter does not follow.*Change it in place: p\.copy_\(\.\.\.\)"
    )
    with pytest.raises(ParameterError, match=match):
        model(X) if loss is None else loss.backward()
    with pytest.raises(ParameterError, match=match):
        model.state_dict()


@pytest.mark.behaviour("H-06", "A-18")
def test_unchanged_data_conversions_and_data_of_local_tensors_are_followed() -> None:
    model = build()
    model(X).sum().backward()
    for convert in (lambda: model.to(torch.float64), lambda: model.to(torch.float32), lambda: model.to(torch.float32)):
        convert()
        model(X.to(next(model.parameters()).dtype)).sum().backward()
    for parameter in model.parameters():
        parameter.data = parameter.data
        parameter.data += 1.0
    plain: Any = nn.Sequential(Encoder(), nn.Tanh(), Encoder())
    plain.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    assert torch.equal(model(X), plain(X))
    weight = model.get_parameter("0.linear.weight")
    weight._local_tensor.data = torch.zeros(4, 4)
    plain[0].linear.weight.data.zero_()
    assert torch.equal(model(X), plain(X))
    weight._local_tensor.set_(torch.ones(4, 4))
    plain[0].linear.weight.data.fill_(1.0)
    assert torch.equal(model(X), plain(X))
    with torch.no_grad():
        weight.fill_(2.0)
        plain[0].linear.weight.fill_(2.0)
    assert torch.equal(model(X), plain(X))


@pytest.mark.behaviour("C-14", "H-06")
@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a step"])
@pytest.mark.parametrize("inside", ["all", "another module"])
def test_operations_that_run_modules_inside_unsharded_params_are_refused(inside: str, ran: bool) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    operations: list[Callable[[], object]] = [lambda: model(X), model.unshard]
    if inside == "all":
        operations += [lambda: model[0](X), model.reset_iter_state, lambda: model.set_is_last_backward(True)]
    if ran:
        model(X).sum().backward()
        operations += [model(X).sum().backward, optimizer.step]
        model.reshard()
    sharded = list(model.parameters())
    group = "(root|0)" if ran else "(Sequential|Encoder)"
    match = rf"^group '{group}' is LENT, .* inside unsharded_params, .*Leave it first\.$"
    with unsharded_params(model if inside == "all" else model[0]):
        full = list(model.parameters())
        for operation in operations:
            with pytest.raises(LifecycleError, match=match):
                operation()
            assert all(a is b for a, b in zip(model.parameters(), full, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), sharded, strict=True))
    model.reset_iter_state()
    model(X).sum().backward()


@pytest.mark.behaviour("C-14", "H-06")
@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a step of its own"])
def test_the_first_forward_of_a_root_is_refused_while_a_module_in_it_is_lent(ran: bool) -> None:
    model = build()
    if ran:
        model[0](X).sum().backward()
    match = r"is LENT, and cannot be unsharded.*inside unsharded_params"
    with unsharded_params(model[0]), pytest.raises(LifecycleError, match=match):
        model(X)
    model(X).sum().backward()


@pytest.mark.behaviour("C-14", "H-06")
def test_a_refused_first_forward_leaves_the_groups_to_their_former_root() -> None:
    owner, user = nn.Linear(4, 4), nn.Linear(4, 4)
    user.weight = owner.weight
    fully_shard(owner)
    fully_shard(user, shared_from=[owner])
    model = fully_shard(nn.Sequential(user, nn.Linear(4, 4)))
    user(X).sum().backward()
    with unsharded_params(owner), pytest.raises(LifecycleError, match="is LENT"):
        model(X)
    assert state_of(user).group.task is state_of(user).root.progress.task
    model(X).sum().backward()


@pytest.mark.behaviour("C-14", "H-06")
def test_the_error_names_a_group_of_the_called_root() -> None:
    first, second = build(), fully_shard(nn.Linear(4, 4))
    for model in (first, second):
        model(X).sum().backward()
    both = nn.ModuleDict({"first": first[0], "second": second})
    with unsharded_params(both):
        with pytest.raises(LifecycleError, match=r"^group '0' is LENT"):
            first(X)
        with pytest.raises(LifecycleError, match=r"^group 'root' is LENT"):
            second(X)
    for model in (first, second):
        model(X).sum().backward()


@pytest.mark.behaviour("C-14")
def test_operations_without_unsharding_work_inside_unsharded_params() -> None:
    model = build()
    model(X).sum().backward()
    model[2].linear.weight.grad = None
    with unsharded_params(model):
        assert not any(isinstance(value, DTensor) for value in model.state_dict().values())
        model.reshard()
        model.zero_grad()
        model.set_schedule(prefetch_limit=3)
        assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(X).sum().backward()


@pytest.mark.behaviour("C-14")
def test_conversions_inside_unsharded_params_are_refused() -> None:
    model = build()
    with unsharded_params(model), pytest.raises(ParameterError, match="was replaced after sharding by a Parameter"):
        model.to(torch.float64)
    model(X).sum().backward()


@pytest.mark.behaviour("C-14")
def test_a_group_unsharded_by_the_user_stays_unsharded_while_another_is_lent() -> None:
    model = build()
    model(X).sum().backward()
    model.unshard()
    with unsharded_params(model[0]):
        assert not isinstance(model[2].linear.weight, DTensor)
    assert not isinstance(model[2].linear.weight, DTensor)
    model(X).sum().backward()


@pytest.mark.behaviour("H-06")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_second_thread_in_one_model_is_refused_and_the_first_continues(where: str) -> None:
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


@pytest.mark.behaviour("D-02")
def test_offloaded_shards_of_a_mesh_without_a_backend_for_cpu_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    without = dist.new_group(backend="cuda:gloo")
    mesh = init_device_mesh("cuda", (1,))
    match = (
        r"(?s)keeps shards on CPU, but the process group of dim 0 of .* has no backend for CPU tensors \(cuda:gloo\)\. "
        r'Training works\..*full_tensor\(\).*clip_grad_norm_.*"cpu:gloo,cuda:nccl"'
    )
    with monkeypatch.context() as patched:
        patched.setattr(type(mesh), "get_group", lambda *_: without)
        with pytest.warns(OffloadBackendWarning, match=match) as found:
            warn_without_cpu_backend(data_parallel_axes(mesh))
        assert len(found) == 1
        with pytest.raises(OffloadBackendWarning, match=match):  # warnings are errors here
            fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        warn_without_cpu_backend(data_parallel_axes(init_device_mesh("cpu", (1,))))
    warn_without_cpu_backend(data_parallel_axes(mesh))


NOTHING_REDUCED = (
    r"^SGD has no gradients to step with: those of 'linear.weight' are accumulated and not reduced: each backward was "
    r"inside of no_sync or after set_requires_gradient_sync\(False\), or failed\. Run the last backward before a step "
    r"outside of no_sync, or drop them with model\.zero_grad\(\); after a failure, call model\.reset_iter_state\(\) on "
    r"all ranks\.$"
)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, local_optimizer])
def test_a_step_after_backwards_inside_of_no_sync_only_is_refused(wrap: Any, sharded: bool) -> None:
    model: Any = fully_shard(Encoder())
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()  # without any gradients, as with any model
    for _ in range(2):
        with no_sync(model, sharded=sharded):
            model(X).sum().backward()
    with pytest.raises(LifecycleError, match=NOTHING_REDUCED):
        optimizer.step()
    before = model.linear.weight.full_tensor().clone()
    model(X).sum().backward()
    optimizer.step()
    assert not model.linear.weight.full_tensor().equal(before), "the error loses no gradients"
    optimizer.zero_grad()
    with no_sync(model, sharded=sharded):
        model(X).sum().backward()
    model.zero_grad()
    optimizer.step()


def test_an_optimizer_of_other_parameters_steps_while_gradients_are_accumulated() -> None:
    model, other = fully_shard(Encoder()), fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with no_sync(model):
        model(X).sum().backward()
    optimizer.step()
    other(X).sum().backward()
    optimizer.step()


def test_arguments_that_are_words_classes_or_text_are_refused_by_name() -> None:
    model = fully_shard(Encoder())
    for form, shown in (("full", "'full'"), (Full, "<class '.*Full'>")):
        wrong: Any = form
        with pytest.raises(ArgumentTypeError, match=rf"^the form of a state dict is Full\(\), .* not {shown}\.$"):
            state_dict(model, wrong)
        with pytest.raises(ArgumentTypeError, match=r"^the form of a state dict is"), state_dict_form(model, wrong):
            pass
    kind: Any = torch.optim.SGD
    text = r"^local_optimizer takes an optimizer, such as .*, not <class '.*SGD'>"
    with pytest.raises(ArgumentTypeError, match=text):
        local_optimizer(kind)
