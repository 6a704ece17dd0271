"""``plan`` and ``sweep``: two steps of a model on fake tensors, as the first rank of a simulated job.

The first forward and backward measure the computation of each group. Memory is counted from the optimizer's step after
them to the end of the second backward, which runs the schedule of later steps.
"""

from __future__ import annotations

import gc
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard, to_empty
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import BucketPlan, Hook, Pass, plan_group
from composable_fsdp._core.hooks import root_of
from composable_fsdp._core.layout import pinned_bytes
from composable_fsdp._core.params import local_part
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import find_state, state_of
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, FSDPError
from composable_fsdp.plan.known_accelerators import Accelerator, KnownAccelerator, as_accelerator
from composable_fsdp.plan.plan_values import Plan, Row
from composable_fsdp.plan.simulate import Costs, predict
from composable_fsdp.plan.simulated_job import KINDS, MemoryLedger, mesh_shape, simulated_job
from composable_fsdp.policies import CPUOffloadPolicy

Batch: TypeAlias = torch.Tensor | str | Sequence[Any] | Mapping[str, Any] | Callable[[], Any]
Optimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]

_OFFLOADED = ("parameters", "gradients", "optimizer state")
"""The kinds of memory that are offloaded."""

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


def as_loss(output: Any) -> torch.Tensor:
    """Return the loss in what a model returns: its ``loss``, or the mean of the output, or of its first part."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = output
    while not isinstance(first, torch.Tensor):
        parts = list(first.values()) if isinstance(first, Mapping) else first
        if not isinstance(parts, Sequence) or not parts:
            raise ConfigurationError(
                f"the model returns {type(output).__name__}, in which plan finds no loss. Pass loss=, a function of "
                "the output."
            )
        first = parts[0]
    return first.float().mean() if first.dim() else first


def plan(
    build: Callable[[], nn.Module],
    batch: Batch,
    *,
    mesh: str = "8",
    device: Accelerator | KnownAccelerator = "h100-80gb",
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
        batch: the batch of one rank: a tensor, a shape such as ``"4x4096"`` (int64) or ``"8x512:bfloat16"``, a
            sequence or mapping of these with the arguments of the model, or a function that returns one. A shape alone
            is also the ``labels`` of a model that takes ``input_ids`` and ``labels``.
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
    settings = {"recompute": recompute, **options} if recompute else options
    offload = options.get("offload_policy")
    if isinstance(offload, Mapping):
        raise ConfigurationError(
            "plan counts the offload of all parameters or of none, and no offload_policy by name. Plan with "
            "offload_policy=CPUOffloadPolicy() and without: the memory and the time of a part are between the two."
        )
    # The device of the simulated job is the host: what is offloaded is counted by its kind.
    given = {key: value for key, value in options.items() if not isinstance(value, CPUOffloadPolicy)}
    with simulated_job(shape, has_streams=accelerator.has_streams) as (device_mesh, streams):
        ledger = MemoryLedger(accelerator, streams)
        with _on_fake_tensors(), ledger.counting():
            model = _sharded(build, device_mesh, given)
            root = root_of(state_of(model))
            computation = _Computation(ledger, {name for name, state in root.states.items() if state.group.parameters})
            root.observers.add(computation)
            if recompute:
                _recompute(root)
            ledger.kind = "activations"
            args, kwargs = make_batch(batch, model)
            keeps_cache = _compute(model, ledger, args, kwargs, loss)
            costs = computation.costs(shape, accelerator)
            gc.collect()
            ledger.restart()
            state, optimizer_seconds = _update(model, ledger, optimizer, foreach=accelerator.has_streams)
            ledger.flops = 0.0
            _compute(model, ledger, args, kwargs, loss)
            dtypes = _dtypes(root, state)
            del state
            peak, timeline = ledger.peak(), predict(root, costs)
            moved = _OFFLOADED if isinstance(offload, CPUOffloadPolicy) else ()
            on_host, copies = 0, 0.0
            if isinstance(offload, CPUOffloadPolicy):
                optimizer_seconds = 0.0
                on_host = sum(peak.largest[kind] for kind in moved)
                copies = 2 * peak.largest["parameters"] / (accelerator.host_gbit * 1e9 / 8)  # not overlapped
                if offload.pin_memory:
                    on_host += sum(_pinned_waste(each.group) for each in root.states.values())
            rows = [Row(kind, 0 if kind in moved else peak.nbytes[kind], peak.largest[kind]) for kind in KINDS]
            seconds = timeline.seconds + copies + optimizer_seconds
            return Plan(
                model=type(model).__name__.removeprefix("FSDP"),
                parameters=sum(prod(parameter.shape) for parameter in model.parameters()),
                groups=len(root.states),
                mesh=mesh,
                device=accelerator,
                settings={key: str(value) for key, value in settings.items()},
                dtypes=dtypes,
                keeps_cache=keeps_cache,
                rows=tuple(rows),
                peak_bytes=sum(row.bytes for row in rows),
                peak_place=peak.place,
                host_bytes=on_host,
                seconds=seconds,
                exposed=timeline.exposed + copies,
                mfu=ledger.flops / (seconds * accelerator.tflops * 1e12) if seconds else 0.0,
                spans=timeline.spans,
                curve=peak.curve,
            )


def sweep(
    build: Callable[[], nn.Module], batch: Batch, settings: Mapping[str, Sequence[Any]], **common: Any
) -> list[tuple[dict[str, Any], Plan]]:
    """Return a plan for each combination of ``settings``: those that fit first, and the fastest of them first.

    Args:
        build: as for :func:`plan`.
        batch: as for :func:`plan`.
        settings: the values to try of each keyword of :func:`plan`, such as ``{"recompute": [False, True]}``.
        common: the other keywords of :func:`plan`.

    Raises:
        ConfigurationError: as for :func:`plan`; or ``settings`` has no values.
    """
    if not settings or not prod(map(len, settings.values())):
        raise ConfigurationError("sweep needs at least one value for each of at least one setting.")
    chosen = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    found = [(each, plan(build, batch, **{**common, **each})) for each in chosen]
    return sorted(found, key=lambda pair: (not pair[1].fits, pair[1].seconds))


class _Computation(Observer):
    """Adds up the seconds that the modules of each group compute, and tells the ledger what runs."""

    def __init__(self, ledger: MemoryLedger, with_parameters: set[str]) -> None:
        self._ledger, self._with_parameters = ledger, with_parameters
        self._seconds: dict[tuple[bool, str], float] = defaultdict(float)
        """The seconds by pass (in backward or not) and group."""
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
            self._seconds[root.current_pass is Pass.BACKWARD, self._last] += ledger.seconds - self._left
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

    def costs(self, shape: tuple[int, ...], accelerator: Accelerator) -> Costs:
        """Return the costs of a step like the one so far, on a mesh of ``shape`` of ``accelerator``.

        Neighbouring ranks shard, and are on one host as far as they fit.
        """
        forward, backward = (
            {name: seconds for (is_back, name), seconds in self._seconds.items() if is_back is in_backward}
            for in_backward in (False, True)
        )
        copy_bandwidth = 1 / accelerator.seconds(0.0, 2, torch.float32)  # a byte is read and written
        shard, replicate = (
            accelerator.collective_cost(crosses_hosts=ranks > accelerator.ranks_per_host)
            for ranks in (shape[-1], prod(shape))
        )
        return Costs(shard, replicate, forward, backward, copy_bandwidth)


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


def _sharded(build: Callable[[], nn.Module], mesh: Any, options: Mapping[str, Any]) -> nn.Module:
    """Return the model that ``build`` makes, sharded by it or with ``options``, with shards on the device."""
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        name = getattr(build, "__qualname__", repr(build))
        raise ConfigurationError(
            f"plan calls {name}() without arguments, but: {error}. Write a function that returns the model."
        ) from error
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


def make_batch(batch: Batch, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``model`` for ``batch``, with new tensors like those in it.

    A single shape is the ``labels``, too, of a model that takes ``input_ids`` and ``labels``, as those of transformers
    do, so that its own loss is counted.

    Raises:
        ConfigurationError: it is no batch.
    """
    if callable(batch):
        batch = batch()
    if isinstance(batch, Mapping):
        return (), {name: _new(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map(_new, batch)), {}
    if isinstance(batch, str) and inspect.signature(model.forward).parameters.keys() >= {"input_ids", "labels"}:
        return (), {"input_ids": _new(batch), "labels": _new(batch)}
    if isinstance(batch, torch.Tensor | str):
        return (_new(batch),), {}
    raise ArgumentTypeError(
        "batch must be a tensor, a shape such as '4x4096' or '8x512:bfloat16', a sequence or mapping of these with the "
        f"model's arguments, or a function that returns one, not {batch!r}."
    )


def _new(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
    found = _SHAPE.fullmatch(value) if isinstance(value, str) else None
    if found is None and isinstance(value, str):
        raise ConfigurationError(f"a shape is written as '4x4096' or '8x512:bfloat16', not {value!r}.")
    if found is None:
        return value
    dtype = getattr(torch, found[2] or "int64", None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"torch has no dtype {found[2]!r}.")
    return torch.zeros(tuple(map(int, found[1].split("x"))), dtype=dtype)


def _recompute(root: Root) -> None:
    """Recompute the forward of the modules of each group within the model in backward."""
    for state in root.states.values():
        if state is not root.root_state:
            for module in state.modules:
                run = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
                module.forward = run


def _compute(
    model: nn.Module, ledger: MemoryLedger, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Callable[[Any], Any]
) -> bool:
    """Run forward and backward. Return whether the model keeps a key/value cache, as those of transformers do."""
    ledger.kind, ledger.place = "activations", "forward"
    output = model(*args, **kwargs)
    keeps_cache = getattr(output, "past_key_values", None) is not None
    value = loss(output)
    del output
    value.backward()
    for tensor in (*model.parameters(), *model.buffers()):
        ledger.mark(local_part(tensor), "parameters")
        if tensor.grad is not None:
            ledger.mark(local_part(tensor.grad), "gradients")
    return keeps_cache


def _dtypes(root: Root, state: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the dtypes of the floating-point shards, of the computation with them, and of the optimizer state."""
    parameters = [each for found in root.states.values() for each in found.group.parameters]
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


def _pinned_waste(group: ParamGroup) -> int:
    """Return the bytes that page-locked memory would take beyond the shards and gradients of a group."""
    specs = tuple(replace(spec, offload=CPUOffloadPolicy()) for spec in group.plan.specs)
    return pinned_waste(plan_group(specs, tuple(pgs.plan_options() for pgs in group.process_groups)).buckets)


def pinned_waste(buckets: Iterable[BucketPlan]) -> int:
    """Return the page-locked memory in bytes that shards and reduced gradients take beyond their sizes."""
    waste = 0
    for bucket in buckets:
        gradient_dtype = bucket.gradient_dtype or bucket.sum_dtype
        sizes = (bucket.shard_bytes, bucket.reduce.sharded_numel * gradient_dtype.itemsize)
        waste += sum(pinned_bytes(nbytes) - nbytes for nbytes in sizes) if bucket.pins_memory else 0
    return waste
