"""Two steps of a model on fake tensors, as the first rank of a simulated job.

The first forward and backward measure the computation of each group and its activations, by the same calibration as in
training. Memory is counted from the optimizer's step after them to the end of the second backward, which runs the
schedule of later steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard, to_empty
from composable_fsdp._core.root import Root
from composable_fsdp._layout.plan import GroupPlan, plan_group
from composable_fsdp._runtime.groups.state import FSDPState, find_state
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.schedule.costs import AxisCosts, Costs
from composable_fsdp._runtime.schedule.schedule import Hook
from composable_fsdp._sharding.process_groups import ProcessGroups
from composable_fsdp.errors import ConfigurationError, FSDPError
from composable_fsdp.plan.known_accelerators import Accelerator
from composable_fsdp.plan.memory_ledger import MemoryLedger, Peak, peak_of
from composable_fsdp.plan.model_inputs import Batch, make_batch
from composable_fsdp.plan.simulated_job import mesh_shape, simulated_job
from composable_fsdp.plugins.tuning.calibration import Calibration
from composable_fsdp.plugins.tuning.clock import Clock
from composable_fsdp.plugins.tuning.group_spec import GroupSpec
from composable_fsdp.plugins.tuning.predict import predicted
from composable_fsdp.plugins.tuning.simulate import Timeline
from composable_fsdp.plugins.tuning.tuning import tuning_of
from composable_fsdp.policies import CPUOffloadPolicy

__all__ = ["GroupActivations", "Rehearsal", "rehearse"]

Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class GroupActivations:
    """The bytes that the forward of one group keeps for its backward, and those of its inputs."""

    kept: int
    inputs: int


@dataclass(frozen=True)
class Rehearsal:
    """The measurements of the two steps.

    Args:
        parameters: the number of elements of the parameters, of all ranks together.
        groups: the number of groups.
        peak: the memory of the second step.
        timeline: the prediction of its forward and backward.
        optimizer_seconds: the time of the optimizer's step.
        flops: the floating-point operations of a step of one rank.
        activations: those of the outermost groups in the model, by name.
        forward: the seconds of the forward of each group.
        dtypes: those of the shards, of the computation and of the optimizer state, as text.
        keeps_cache: the model returns a key/value cache, as those of transformers do.
        pinned_waste: the bytes by which page-locked memory would be larger than offloaded shards and gradients.
        variants: the timelines with other settings of the groups, by the name of the change.
    """

    parameters: int
    groups: int
    peak: Peak
    timeline: Timeline
    optimizer_seconds: float
    flops: float
    activations: Mapping[str, GroupActivations]
    forward: Mapping[str, float]
    dtypes: Mapping[str, str]
    keeps_cache: bool
    pinned_waste: int
    variants: Mapping[str, Timeline] = field(default_factory=dict)


@dataclass
class _Observer:
    """Tells the ledger what runs, beside the calibration."""

    ledger: MemoryLedger
    groups: Mapping[str, FSDPState]
    calibration: Calibration
    activations: dict[str, GroupActivations] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0
    keeps_cache: bool = False
    _running: list[tuple[str, int]] = field(default_factory=list)
    """The groups in forward, with the bytes of activations before each."""

    def begin_step(self, waited: float) -> Costs | None:
        return self.calibration.begin_step(waited)

    def enter(self, hook: Hook, group: str, *, in_backward: bool, waited: float) -> None:
        self.ledger.in_runtime = True
        if hook is Hook.POST_FORWARD and not in_backward and self._running:
            name, before = self._running.pop()
            if len(self._running) == 1:
                kept = self.ledger.held["activations"] - before
                self.activations[name] = GroupActivations(kept, self.inputs.get(name, 0))
        if hook is Hook.GRAD_READY:
            for parameter in self.groups[group].group.parameters:
                for gradient in (parameter.unsharded.grad, parameter.accumulated):
                    if gradient is not None:
                        self.ledger.mark(local_part(gradient), "unsharded")
        self.calibration.enter(hook, group, in_backward=in_backward, waited=waited)

    def leave(self, hook: Hook, group: str, *, ends_pass: bool, waited: float) -> None:
        self.calibration.leave(hook, group, ends_pass=ends_pass, waited=waited)
        self.ledger.in_runtime = False
        if hook is Hook.PRE_FORWARD:
            self._running.append((group, self.ledger.held["activations"]))
        if hook in _DIRECTIONS:
            self.ledger.place = f"{_DIRECTIONS[hook]} of {group}"


_DIRECTIONS = {Hook.PRE_FORWARD: "forward", Hook.PRE_BACKWARD: "backward"}


def rehearse(
    build: Callable[[], nn.Module],
    batch: Batch,
    *,
    mesh: str,
    accelerator: Accelerator,
    optimizer: Optimizer,
    loss: Callable[[Any], torch.Tensor],
    recompute: bool,
    chooses: bool,
    changes: Mapping[str, Callable[[GroupSpec], GroupSpec]],
    options: Mapping[str, Any],
) -> Rehearsal:
    """Run two steps of the model, and return their measurements.

    The other arguments are those of :func:`composable_fsdp.plan.plan`.

    Args:
        chooses: the second step has the settings that are chosen by costs.
        changes: the changes of the groups to predict too, by name.
    """
    shape = mesh_shape(mesh)
    with simulated_job(shape, has_streams=accelerator.has_streams) as (device_mesh, streams):
        ledger = MemoryLedger(accelerator, streams)
        with FakeTensorMode(allow_non_fake_inputs=True), ledger.counting(), _without_collection(), _explained():
            model = _sharded(build, device_mesh, options)
            root = find_state(model)
            assert root is not None
            iteration = iteration_of(root)
            observer = _observe(iteration, ledger)
            if recompute:
                _recompute(iteration)
            ledger.kind = "activations"
            args, kwargs = make_batch(batch, model)

            def forward() -> torch.Tensor:
                output = model(*args, **kwargs)
                observer.keeps_cache = getattr(output, "past_key_values", None) is not None
                return loss(output)

            compute = partial(_compute, model, ledger, forward)
            compute()
            measured = observer.calibration.begin_step(0.0)
            assert measured is not None
            costs = replace(measured, axes=_axes(shape, accelerator), source=f"figures of {accelerator.name}")
            observer.calibration = _calibration(iteration, ledger)
            if chooses:
                cast(Any, model).set_costs(costs)
            gc.collect()
            ledger.restart()
            state, optimizer_seconds = _update(model, ledger, optimizer, foreach=accelerator.has_streams)
            ledger.flops = 0.0
            compute()
            dtypes = _dtypes(iteration, state)
            del state
            return Rehearsal(
                sum(prod(parameter.shape) for parameter in model.parameters()),
                len(iteration.states),
                peak_of(ledger),
                predicted(iteration, costs),
                optimizer_seconds,
                ledger.flops,
                observer.activations,
                costs.forward,
                dtypes,
                observer.keeps_cache,
                sum(_pinned_waste(state.group.plan, state.group.process_groups) for state in iteration.states.values()),
                {name: predicted(iteration, costs, change) for name, change in changes.items()},
            )


@contextmanager
def _explained() -> Iterator[None]:
    """Raise a ``ConfigurationError`` for errors of the model: tensors without values do not do all that others do."""
    try:
        yield
    except FSDPError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the model cannot be built and run on tensors without values: {type(error).__name__}: {error} Its forward "
            "must not depend on values of tensors, nor name a device other than that of its input."
        ) from error


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage in this context: it would take a third of the time, for the many small objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _sharded(build: Callable[[], nn.Module], mesh: Any, options: Mapping[str, Any]) -> nn.Module:
    """Return the model that ``build`` makes, sharded by it or with ``options``, with shards on the device."""
    model = build()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"build must return an nn.Module, not {type(model).__name__}.")
    is_sharded = any(find_state(module) is not None for module in model.modules())
    if is_sharded and find_state(model) is None:
        raise ConfigurationError("build has sharded modules of the model, but not the model itself: do so last.")
    if is_sharded and options:
        raise ConfigurationError(
            f"build has sharded the model already, so plan cannot apply {', '.join(sorted(options))}. Leave it out, or "
            "return the model unsharded."
        )
    if not is_sharded:
        fully_shard(model, mesh=mesh, **options)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        to_empty(model, device="cpu")
    return model


def _calibration(iteration: Root, ledger: MemoryLedger) -> Calibration:
    groups = {name: state.group for name, state in iteration.states.items() if state.group.parameters}
    clock = Clock(iteration.root.group.axes.device, lambda: ledger.seconds)
    return Calibration((), (), groups, 1, clock)


def _observe(iteration: Root, ledger: MemoryLedger) -> _Observer:
    """Return the observer of ``iteration``, which also notes the bytes of inputs of the modules of each group."""
    observer = _Observer(ledger, iteration.states, _calibration(iteration, ledger))
    tuning_of(iteration).measure(iteration, observer)

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.requires_grad)
        observer.inputs[name] = sum(each.nbytes for each in tensors)

    for name, state in iteration.states.items():
        for module in state.modules:
            module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
    return observer


def _recompute(iteration: Root) -> None:
    """Recompute the forward of the modules of each group within the model in backward."""
    for state in iteration.states.values():
        if state is not iteration.root:
            for module in state.modules:
                run = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
                module.forward = run


def _compute(model: nn.Module, ledger: MemoryLedger, forward: Callable[[], torch.Tensor]) -> None:
    """Run forward and backward."""
    ledger.kind, ledger.place = "activations", "forward"
    forward().backward()
    for tensor in (*model.parameters(), *model.buffers()):  # a choice of settings may have made new shards
        ledger.mark(local_part(tensor), "parameters")
        if tensor.grad is not None:
            ledger.mark(local_part(tensor.grad), "gradients")


def _dtypes(iteration: Root, state: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the dtypes of the floating-point shards, of the computation with them, and of the optimizer state."""
    parameters = [each for found in iteration.states.values() for each in found.group.parameters]
    kept = [each for values in state for each in values.values() if isinstance(each, torch.Tensor) and each.dim()]
    kinds = {
        "shards": {each.dtype for each in parameters},
        "computation": {each.unsharded.dtype for each in parameters},
        "optimizer state": {each.dtype for each in kept},
    }
    return {
        kind: " and ".join(sorted(str(each).removeprefix("torch.") for each in found)) or "none"
        for kind, found in kinds.items()
    }


def _update(
    model: nn.Module, ledger: MemoryLedger, make: Optimizer, *, foreach: bool
) -> tuple[list[Mapping[str, Any]], float]:
    """Run the first step of an optimizer. Return its state, and the seconds of the step.

    It gets the local shards: what DTensor would do for it is neither memory nor time of the device. ``foreach`` is
    torch's default on accelerators.
    """
    shards = []
    for parameter in model.parameters():
        shard = nn.Parameter(local_part(parameter).detach(), requires_grad=parameter.requires_grad)
        shard.grad = None if parameter.grad is None else local_part(parameter.grad)
        shards.append(shard)
    optimizer = make(shards)
    for group in optimizer.param_groups:
        if foreach and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    ledger.kind, ledger.place, begin = "optimizer state", "the optimizer's step", ledger.seconds
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    return list(optimizer.state.values()), ledger.seconds - begin


def _pinned_waste(plan: GroupPlan, process_groups: Sequence[ProcessGroups]) -> int:
    """Return the bytes that page-locked memory would take beyond the shards and gradients of a group."""
    specs = tuple(replace(spec, offload=CPUOffloadPolicy()) for spec in plan.specs)
    buckets = plan_group(specs, tuple(pgs.plan_options() for pgs in process_groups)).buckets
    return sum(bucket.pinned_waste for bucket in buckets)


def _axes(shape: tuple[int, ...], accelerator: Accelerator) -> dict[str, AxisCosts]:
    """Return the costs of the mesh axes. Neighbouring ranks shard, and are on one host as far as they fit."""
    shards, ranks = shape[-1], prod(shape)
    return {
        "": accelerator.axis_costs(crosses_hosts=shards > accelerator.ranks_per_host),
        "replicate": accelerator.axis_costs(crosses_hosts=ranks > accelerator.ranks_per_host),
    }
