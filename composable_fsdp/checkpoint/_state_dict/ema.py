"""``sharded_ema``: moving averages of a model's weights, of which each rank keeps those of its own shards.

Invariants: an average lies where its parameter does, so that updates need no communication. Outside of
:meth:`ShardedEMA.swapped` the model's values are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, refuse, tensor_text
from composable_fsdp.checkpoint._state_dict.names import Entry, at_rest, on_meta, plain_name
from composable_fsdp.checkpoint._state_dict.tensor import compare, fill
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError

__all__ = ["ShardedEMA", "sharded_ema"]

Decay = Callable[[int], float]


def sharded_ema(
    model: nn.Module,
    decay: float | Decay,
    *,
    dtype: torch.dtype | None = None,
    offload_to_cpu: bool = False,
    average_buffers: bool = False,
) -> ShardedEMA:
    """An exponential moving average of the weights of ``model``, which begins with what they are now.

    Frozen parameters are not averaged and take no memory: they are their own average. Call it after ``fully_shard``,
    on every rank.

    Args:
        model: sharded or not.
        decay: what an update keeps of the average, from 0 to 1, or a function of the number of the update, counted from
            1: ``lambda step: min(0.999, (1 + step) / (10 + step))`` warms up.
        dtype: of the averages. ``None``: that of the parameter, but at least float32: what an update adds is mostly
            less than the last bit of a 16-bit float.
        offload_to_cpu: keep the averages in host memory, where each update copies the shards.
        average_buffers: average floating-point buffers too, such as the statistics of a batch norm. Without it the
            model's own are used with the averages.

    Raises:
        ConfigurationError: ``decay`` or ``dtype`` makes no sense, or shards are of a tensor class of their own.
        ParameterError: some of what is to be averaged is on the meta device. Named in the text.
    """
    if not callable(decay):
        _check_decay(decay)
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"averages need a floating-point dtype, not {dtype}.")
    return ShardedEMA(model, decay if callable(decay) else lambda _: decay, dtype, offload_to_cpu, average_buffers)


class ShardedEMA:
    """Averages of a model's weights, from :func:`sharded_ema`.

    ``save(..., averages=...)`` and ``load(..., averages=...)`` of ``composable_fsdp.checkpoint`` have them in the same
    checkpoint as the model, on any number of ranks. It also has the methods of ``torch.distributed.checkpoint``'s
    ``Stateful``.

    Attributes:
        steps: how many updates there were.
        averages: by the names of the model, DTensors where the parameters are, of which every rank has its shard.
    """

    def __init__(
        self, model: nn.Module, decay: Decay, dtype: torch.dtype | None, offload_to_cpu: bool, buffers: bool
    ) -> None:
        self.steps = 0
        self._model = model
        self._decay = decay
        self._averages_buffers = buffers
        self._is_swapped = False
        current = {entry.name: entry for entry in self._current() if entry.value.requires_grad or _is_buffer(entry)}
        _check_averageable(current)
        device = torch.device("cpu") if offload_to_cpu else None
        self.averages = {name: _average_of(entry.value, dtype, device) for name, entry in current.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards what the weights are now: call it after the optimizer's step. No communication.

        Raises:
            LifecycleError: inside :meth:`swapped`.
            ConfigurationError: the function gave a decay that is not from 0 to 1; nothing has changed then.
            ParameterError: the model lacks a parameter that is averaged.
        """
        self._check_own("update()")
        weight = 1.0 - _check_decay(self._decay(self.steps + 1))
        pairs = list(zip(self._locals(), self._values(), strict=True))
        alike = [(a, v) for a, v in pairs if a.dtype == v.dtype and a.device == v.device]
        if alike:
            averages, values = zip(*alike, strict=True)
            torch._foreach_lerp_(averages, values, weight)
        for average, value in pairs:
            if average.dtype != value.dtype or average.device != value.device:
                average.lerp_(value.to(average.device, average.dtype), weight)
        self.steps += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within, the model has the averages in the place of its own weights, for evaluation and export.

        Afterwards its own are back, whatever was done to them inside. It takes memory for the model's shards once more.
        Enter it on all ranks, and outside of passes.

        Raises:
            LifecycleError: inside another one.
        """
        self._check_own("swapped()")
        before = [value.clone() for value in self._values()]
        self._write(self._locals())
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            self._write(before)

    def state_dict(self) -> dict[str, Any]:
        """``{"steps": ..., "averages": {name: tensor}}``, which aliases the averages."""
        return {"steps": self.steps, "averages": dict(self.averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies the values of :meth:`state_dict`: full tensors, or DTensors on any mesh, on all ranks together.

        Raises:
            CheckpointError: names, shapes or kinds of dtypes are others. Listed in the text; nothing is loaded then.
        """
        given: Mapping[str, torch.Tensor] = state_dict["averages"]
        mismatch = Mismatch(unexpected={n: type(v).__name__ for n, v in given.items() if n not in self.averages})
        for name, average in self.averages.items():
            if name in given:
                compare(name, average, given[name], None, mismatch)
            else:
                mismatch.missing[name] = tensor_text(average.dtype, average.shape)
        refuse(f"the averages do not fit those of {type(self._model).__name__}", {0: mismatch})
        for entry in self.entries():
            fill(entry.value, entry.sharding, given[entry.name].detach(), None)
        self.steps = int(state_dict["steps"])

    def entries(self) -> list[Entry]:
        """The averages with how their parameters are cut, for checkpoints."""
        return [replace(entry, value=self.averages[entry.name]) for entry in self._averaged()]

    # -- the model, and this rank's part of both

    def _current(self) -> list[Entry]:
        """What of the model may be averaged, at rest."""
        shardings = at_rest(self._model)
        tensors = [*self._model.named_parameters()]
        if self._averages_buffers:
            tensors += [*self._model.named_buffers()]  # type: ignore[list-item]
        return [
            Entry(plain_name(name), tensor, shardings.get(id(tensor)))
            for name, tensor in tensors
            if tensor.is_floating_point() or tensor.is_complex()
        ]

    def _averaged(self) -> list[Entry]:
        """What is averaged, in the order of the averages."""
        current = {entry.name: entry for entry in self._current()}
        lost = [name for name in self.averages if name not in current]
        if lost:
            raise ParameterError(
                f"these are averaged, but {type(self._model).__name__} has them no longer: {lost}. Make another "
                "sharded_ema once the model is what it is to be."
            )
        return [current[name] for name in self.averages]

    def _values(self) -> list[torch.Tensor]:
        return [local_part(entry.value).detach() for entry in self._averaged()]

    def _locals(self) -> list[torch.Tensor]:
        return [local_part(average) for average in self.averages.values()]

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        """Overwrites the model's shards, at rest."""
        averaged = self._averaged()
        if averaged:
            torch._foreach_copy_([local_part(entry.value).detach() for entry in averaged], values)
            increment_version([entry.value for entry in averaged])  # who looks at them sees that they have changed

    def _check_own(self, what: str) -> None:
        if self._is_swapped:
            raise LifecycleError(
                f"{what} came inside swapped(), where the model's values are the averages themselves. Leave it first."
            )


def _is_buffer(entry: Entry) -> bool:
    return not isinstance(entry.value, nn.Parameter)


def _check_decay(decay: float) -> float:
    if not 0.0 <= decay <= 1.0:
        raise ConfigurationError(f"the decay of an average must be from 0 to 1, but is {decay!r}.")
    return decay


def _check_averageable(entries: Mapping[str, Entry]) -> None:
    for problem in on_meta((name, entry.value) for name, entry in entries.items()):
        raise ParameterError(f"sharded_ema: {problem}")
    own_class = {n: type(local).__name__ for n, e in entries.items() if type(local := _local(e)) is not torch.Tensor}
    if own_class:
        raise ConfigurationError(
            f"sharded_ema averages plain shards, but these are of tensor classes of their own: {own_class}. Average "
            "with copy.deepcopy(model) and the operations that these classes have."
        )


def _local(entry: Entry) -> torch.Tensor:
    return local_part(entry.value).detach()


@torch.no_grad()
def _average_of(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
    """A copy of ``tensor``, placed as it is, on ``device`` if any is said."""
    local = local_part(tensor).detach()
    kind = dtype or torch.promote_types(local.dtype, torch.float32)
    own = local.to(device or local.device, kind, copy=True)
    if not isinstance(tensor, DTensor):
        return own
    spec = cast(Any, tensor)._spec
    return DTensor(own, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=kind)), requires_grad=False)
