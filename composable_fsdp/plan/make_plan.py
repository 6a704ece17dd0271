"""``plan``: two steps of a model on fake tensors, as the first rank of a simulated job.

The first forward and backward measure the computation of each group. Memory is counted from the optimizer's step after
them to the end of the second backward, which runs the schedule of later steps.
"""

from __future__ import annotations

import gc
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard, to_empty
from composable_fsdp._core.group_plan import Hook, Pass
from composable_fsdp._core.hooks import root_of
from composable_fsdp._core.params import local_part
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import find_state, state_of
from composable_fsdp.errors import ConfigurationError, FSDPError
from composable_fsdp.plan.dry_run import schedule_of
from composable_fsdp.plan.known_accelerators import Accelerator, as_accelerator
from composable_fsdp.plan.plan_values import Plan, Row
from composable_fsdp.plan.simulate import simulate, spec_of
from composable_fsdp.plan.simulated_job import KINDS, MemoryLedger, mesh_shape, simulated_job
from composable_fsdp.policies import CPUOffloadPolicy

Batch: TypeAlias = torch.Tensor | str | Sequence[Any] | Mapping[str, Any]
Optimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]

_OFFLOADED = ("parameters", "gradients", "optimizer state")
"""The kinds of memory that are offloaded."""

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


def as_loss(output: Any) -> torch.Tensor:
    """Return the loss in what a model returns: its ``loss``, or the mean of the output, or of its first tensor."""
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
    if loss is None:
        raise ConfigurationError(
            f"the model returns {type(output).__name__}, in which plan finds no loss. Pass loss=, a function of the "
            "output."
        )
    return loss.float().mean() if loss.dim() else loss


def plan(
    build: Callable[[], nn.Module],
    batch: Batch,
    *,
    mesh: str = "8",
    device: Accelerator | str = "h100-80gb",
    optimizer: Optimizer = torch.optim.AdamW,
    loss: Callable[[Any], torch.Tensor] = as_loss,
    recompute: bool = False,
    **options: Any,
) -> Plan:
    """Predict the memory and the time of a training step of each rank of a job, without running the job.

    The model is built, sharded and run on tensors without memory (``FakeTensorMode``), as the first of the ranks. Its
    memory is counted operation by operation, and the time is that of the simulated schedule.

    Args:
        build: returns the model, unsharded, or sharded by ``fully_shard`` on the default mesh.
        batch: the batch of one rank: a tensor, a shape such as ``"4x4096"`` (int64) or ``"8x512:bfloat16"``, or a
            sequence or mapping of these with the arguments of the model. A shape alone is also the ``labels`` of a
            model that takes ``input_ids`` and ``labels``.
        mesh: the ranks, such as ``"64"``, or replicas x shards, such as ``"8x64"``.
        device: the accelerator of each rank, or the name of a known one (``ACCELERATORS``).
        optimizer: makes the optimizer of the model's parameters.
        loss: returns the loss in what the model returns: by default its ``loss``, or a mean.
        recompute: run the forward of each group within the model again in backward, as under activation checkpointing.
        options: the keywords of ``fully_shard``, except ``mesh`` and ``device``.

    Raises:
        ConfigurationError: an argument is invalid, or the model cannot run without values of tensors.
        LifecycleError: this process has a process group.
    """
    shape, accelerator = mesh_shape(mesh), as_accelerator(device)
    if isinstance(options.get("offload_policy"), Mapping):
        raise ConfigurationError(
            "plan counts the offload of all parameters or of none, and no offload_policy by name. Plan with "
            "offload_policy=CPUOffloadPolicy() and without: the memory and the time of a part are between the two."
        )
    # The device of the simulated job is the host: what is offloaded is counted by its kind.
    given = {key: value for key, value in options.items() if not isinstance(value, CPUOffloadPolicy)}
    moved = _OFFLOADED if len(given) < len(options) else ()
    with simulated_job(shape, has_streams=accelerator.has_streams) as (device_mesh, streams):
        ledger = MemoryLedger(accelerator, streams)
        with _on_fake_tensors(), ledger.counting():
            model = build()
            if given or find_state(model) is None:
                fully_shard(model, mesh=device_mesh, **given)
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                to_empty(model, device="cpu")
            root = root_of(state_of(model))
            computation = _Computation(ledger, {name for name, state in root.states.items() if state.group.parameters})
            root.observers.add(computation)
            if recompute:
                _recompute(root)
            ledger.kind = "activations"
            args, kwargs = make_batch(batch, model)
            _compute(model, ledger, args, kwargs, loss)
            forward, backward = computation.forward.copy(), computation.backward.copy()
            gc.collect()
            ledger.restart()
            kept, optimizer_seconds = _update(model, ledger, optimizer, foreach=accelerator.has_streams)
            ledger.flops = 0.0
            _compute(model, ledger, args, kwargs, loss)
            del kept
            at_peak, largest, place = ledger.peak()
            specs = {name: spec_of(state) for name, state in root.states.items()}
            seconds, exposed = simulate(schedule_of(root), specs, accelerator, forward, backward)
            if moved:  # the host steps, and parameters and gradients are copied beside nothing else
                optimizer_seconds = 2 * largest["parameters"] / (accelerator.host_gbit * 1e9 / 8)
                exposed += optimizer_seconds
            seconds += optimizer_seconds
            rows = [Row(kind, 0 if kind in moved else at_peak[kind], largest[kind]) for kind in KINDS]
            return Plan(
                model=type(model).__name__.removeprefix("FSDP"),
                parameters=sum(prod(parameter.shape) for parameter in model.parameters()),
                groups=len(root.states),
                mesh=mesh,
                device=accelerator,
                rows=tuple(rows),
                peak_bytes=sum(row.bytes for row in rows),
                peak_place=place,
                host_bytes=sum(largest[kind] for kind in moved),
                seconds=seconds,
                exposed=exposed,
                mfu=ledger.flops / (seconds * accelerator.tflops * 1e12) if seconds else 0.0,
            )


class _Computation(Observer):
    """Adds up the seconds that the modules of each group compute, and tells the ledger what runs.

    Attributes:
        forward: the seconds by group.
        backward: the same in backward.
    """

    def __init__(self, ledger: MemoryLedger, with_parameters: set[str]) -> None:
        self._ledger, self._with_parameters = ledger, with_parameters
        self.forward: dict[str, float] = defaultdict(float)
        self.backward: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        """The groups whose modules run or are in backward, innermost last."""
        self._left: float | None = None
        """The end of the last hook."""
        self._last = ""
        """The last group with parameters that time was counted for."""

    def before_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        ledger, group = self._ledger, subject.name
        ledger.in_runtime = True
        if hook is Hook.GRAD_READY:
            for parameter in subject.group.parameters:
                for gradient in (parameter.unsharded.grad, parameter.accumulated):
                    if gradient is not None:
                        ledger.mark(local_part(gradient), "unsharded")
        if self._left is not None:
            computed = group if hook in (Hook.GRAD_READY, Hook.POST_BACKWARD) else self._running[-1]
            # A group without parameters has no time of its own: it counts for the last group that has some.
            known = (name for name in (computed, self._last, group) if name in self._with_parameters)
            self._last = next(known, computed)
            seconds = self.backward if root.current_pass is Pass.BACKWARD else self.forward
            seconds[self._last] += ledger.seconds - self._left
            self._left = None

    def after_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        group = subject.name
        if group in self._running and hook is not Hook.GRAD_READY:
            self._running.remove(group)
        if hook in _DIRECTIONS:
            self._running.append(group)
            self._ledger.place = f"{_DIRECTIONS[hook]} of {group}"
        if root.current_pass is Pass.IDLE:
            self._running.clear()
        self._ledger.in_runtime = False
        self._left = self._ledger.seconds if self._running else None


_DIRECTIONS = {Hook.PRE_FORWARD: "forward", Hook.PRE_BACKWARD: "backward"}


@contextmanager
def _on_fake_tensors() -> Iterator[None]:
    """Raise a ``ConfigurationError`` for errors of the model: tensors without values do not do all that others do.

    No garbage is collected inside: it would take a third of the time, for the many small objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except FSDPError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the model cannot be built and run on tensors without values: {type(error).__name__}: {error} Its forward "
            "must not depend on values of tensors, nor name a device other than that of its input."
        ) from error
    finally:
        if was_enabled:
            gc.enable()


def make_batch(batch: Batch, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``model`` for ``batch``, with new tensors like those in it.

    A single shape is the ``labels``, too, of a model that takes ``input_ids`` and ``labels``, as those of transformers
    do, so that its own loss is counted.
    """
    if isinstance(batch, str) and inspect.signature(model.forward).parameters.keys() >= {"input_ids", "labels"}:
        batch = {"input_ids": batch, "labels": batch}
    if isinstance(batch, Mapping):
        return (), {name: _new(value) for name, value in batch.items()}
    return tuple(map(_new, batch if isinstance(batch, tuple | list) else (batch,))), {}


def _new(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
    if not isinstance(value, str):
        return value
    found = _SHAPE.fullmatch(value)
    if found is None:
        raise ConfigurationError(f"a shape is written as '4x4096' or '8x512:bfloat16', not {value!r}.")
    return torch.zeros(tuple(map(int, found[1].split("x"))), dtype=getattr(torch, found[2] or "int64"))


def _recompute(root: Root) -> None:
    """Recompute the forward of the modules of each group within the model in backward."""
    for state in root.states.values():
        if state is not root.root_state:
            for module in state.modules:
                run = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
                module.forward = run


def _compute(
    model: nn.Module, ledger: MemoryLedger, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Callable[[Any], Any]
) -> None:
    """Run forward and backward."""
    ledger.kind, ledger.place = "activations", "forward"
    output = model(*args, **kwargs)
    value = loss(output)
    del output
    value.backward()
    for tensor in (*model.parameters(), *model.buffers()):
        ledger.mark(local_part(tensor), "parameters")
        if tensor.grad is not None:
            ledger.mark(local_part(tensor.grad), "gradients")


def _update(
    model: nn.Module, ledger: MemoryLedger, make: Optimizer, *, foreach: bool
) -> tuple[torch.optim.Optimizer, float]:
    """Run the first step of an optimizer. Return it, which has its state, and the seconds of the step.

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
    return optimizer, ledger.seconds - begin
