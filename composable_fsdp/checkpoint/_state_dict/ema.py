"""``sharded_ema``: exponential moving averages of a model's weights, sharded like the weights.

Invariants: an average has the placements of its parameter, so updates need no communication. Outside of
:meth:`ShardedEMA.swapped` the model holds its own values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from composable_fsdp._api.extents import like, plain_name, shardings_of, states_below
from composable_fsdp._core.params import local_part
from composable_fsdp.checkpoint._state_dict.model import OwnerRanks, StateDictLoader
from composable_fsdp.checkpoint._state_dict.tensors import Entry, on_meta, prepare_for_access
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError

Decay = Callable[[int], float]


def sharded_ema(
    model: nn.Module,
    decay: float | Decay,
    *,
    dtype: torch.dtype | None = None,
    offload_to_cpu: bool = False,
    average_buffers: bool = False,
) -> ShardedEMA:
    """Return an exponential moving average of the weights of ``model``, initialized with their current values.

    Frozen parameters are not averaged and take no memory: their average is their value. Call this after
    ``fully_shard``, on every rank.

    Args:
        model: a module, sharded or not.
        decay: the fraction of the average that an update keeps, from 0 to 1, or a function of the update's number,
            counted from 1: ``lambda step: min(0.999, (1 + step) / (10 + step))`` warms up.
        dtype: the dtype of the averages. ``None``: the parameter's dtype, but at least float32, because an update is
            mostly smaller than the last bit of a 16-bit float.
        offload_to_cpu: keep the averages in host memory. Each update then copies the shards.
        average_buffers: average floating-point buffers too, such as the statistics of a batch norm. Without it, the
            averaged weights are used with the model's own buffers.

    Raises:
        ConfigurationError: ``decay`` or ``dtype`` is invalid, or some shards are tensor subclasses.
        ParameterError: tensors to be averaged are on the meta device. The text names them.
    """
    if not callable(decay):
        _check_decay(decay)
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"averages need a floating-point dtype, not {dtype}.")
    return ShardedEMA(model, decay if callable(decay) else lambda _: decay, dtype, offload_to_cpu, average_buffers)


class ShardedEMA:
    """Averages of a model's weights, made by :func:`sharded_ema`.

    ``save(..., averages=...)`` and ``load(..., averages=...)`` of ``composable_fsdp.checkpoint`` keep them in the same
    checkpoint as the model, for any number of ranks. The methods of ``torch.distributed.checkpoint``'s ``Stateful`` are
    there too.

    Attributes:
        steps: the number of updates so far.
        averages: the averages by parameter name. Where the parameter is a DTensor, so is its average.
    """

    def __init__(
        self, model: nn.Module, decay: Decay, dtype: torch.dtype | None, offload_to_cpu: bool, buffers: bool
    ) -> None:
        self.steps = 0
        self._model = model
        self._decay = decay
        self._averages_buffers = buffers
        self._is_swapped = False
        prepare_for_access(model)
        frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
        current = [entry for entry in self._current() if id(entry.value) not in frozen]
        _check_averageable(current)
        self.averages = {entry.name: _average_of(entry.value, dtype, offload_to_cpu) for entry in current}

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the current weights. Call it after the optimizer's step; it does not communicate.

        Raises:
            LifecycleError: called inside :meth:`swapped`.
            ConfigurationError: the decay function returned a value outside of 0 to 1. Nothing has changed then.
            ParameterError: an averaged parameter is no longer in the model.
        """
        self._check_not_swapped("update()")
        weight = 1.0 - _check_decay(self._decay(self.steps + 1))
        prepare_for_access(self._model)
        pairs = list(zip(self._locals(), self._values(), strict=True))
        same_kind = [(a, v) for a, v in pairs if a.dtype == v.dtype and a.device == v.device]
        if same_kind:
            averages, values = zip(*same_kind, strict=True)
            torch._foreach_lerp_(averages, values, weight)
        for average, value in pairs:
            if average.dtype != value.dtype or average.device != value.device:
                average.lerp_(value.to(average.device, average.dtype), weight)
        self.steps += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the model's weights with the averages inside the block, for evaluation and export.

        On exit the model's own weights are restored, even if they were changed inside. This takes memory for a second
        copy of the model's shards. Enter it on all ranks, outside of forward and backward.

        Raises:
            LifecycleError: inside another ``swapped`` block.
        """
        self._check_not_swapped("swapped()")
        prepare_for_access(self._model)
        before = [value.clone() for value in self._values()]
        self._write(self._locals())
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            prepare_for_access(self._model)  # a forward inside the block may have left it unsharded
            self._write(before)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"steps": ..., "averages": {name: tensor}}``, which aliases the averages."""
        return {"steps": self.steps, "averages": dict(self.averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the values of :meth:`state_dict`: full tensors, or DTensors on any mesh. Call it on all ranks together.

        Raises:
            CheckpointError: names, shapes or kinds of dtypes differ on some rank. The text lists them and is the same
                on every rank. Nothing is loaded then.
        """
        prepare_for_access(self._model)
        entries = {entry.name: entry for entry in self.entries()}
        loader = StateDictLoader(OwnerRanks.of((entry.value, entry.sharding) for entry in entries.values()), None)
        loader.match(entries, state_dict["averages"])
        loader.agree(f"the averages do not fit those of {type(self._model).__name__}")
        loader.fill(entries)
        self.steps = int(state_dict["steps"])

    def entries(self) -> list[Entry]:
        """Return the averages with the sharding of their parameters. The model must be prepared for access."""
        return [replace(entry, value=self.averages[entry.name]) for entry in self._averaged()]

    def _current(self) -> list[Entry]:
        """Return those of the model's tensors that can be averaged."""
        shardings = shardings_of(states_below(self._model))
        tensors = [*self._model.named_parameters()]
        if self._averages_buffers:
            tensors += [*self._model.named_buffers()]  # type: ignore[list-item]
        return [
            Entry(plain_name(name), tensor, shardings.get(id(tensor)))
            for name, tensor in tensors
            if tensor.is_floating_point() or tensor.is_complex()
        ]

    def _averaged(self) -> list[Entry]:
        """Return the model's tensors that are averaged, in the order of the averages."""
        current = {entry.name: entry for entry in self._current()}
        lost = [name for name in self.averages if name not in current]
        if lost:
            raise ParameterError(
                f"these are averaged, but {type(self._model).__name__} has them no longer: {lost}. Make another "
                "sharded_ema once the model is what it is to be."
            )
        return [current[name] for name in self.averages]

    def _values(self) -> list[torch.Tensor]:
        """Return the model's shards that are averaged."""
        return [_local(entry) for entry in self._averaged()]

    def _locals(self) -> list[torch.Tensor]:
        return [local_part(average) for average in self.averages.values()]

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        if values:
            torch._foreach_copy_(self._values(), values)
            increment_version([entry.value for entry in self._averaged()])  # copies to their local tensors do not

    def _check_not_swapped(self, what: str) -> None:
        if self._is_swapped:
            raise LifecycleError(
                f"{what} was called inside swapped(), where the model's values are the averages. Leave it first."
            )


def _check_decay(decay: Any) -> float:
    if not isinstance(decay, (int, float)) or not 0.0 <= decay <= 1.0:
        raise ConfigurationError(f"the decay of an average must be from 0 to 1, but is {decay!r}.")
    return float(decay)


def _check_averageable(entries: list[Entry]) -> None:
    for problem in on_meta((entry.name, entry.value) for entry in entries):
        raise ParameterError(f"sharded_ema: {problem}")
    own_class = {e.name: type(local).__name__ for e in entries if type(local := _local(e)) is not torch.Tensor}
    if own_class:
        raise ConfigurationError(
            f"sharded_ema averages plain shards, but these are of tensor classes of their own: {own_class}. Average "
            "with copy.deepcopy(model) and the operations that these classes have."
        )


def _local(entry: Entry) -> torch.Tensor:
    return local_part(entry.value).detach()


@torch.no_grad()
def _average_of(tensor: torch.Tensor, dtype: torch.dtype | None, offload_to_cpu: bool) -> torch.Tensor:
    local = local_part(tensor).detach()
    device = torch.device("cpu") if offload_to_cpu else local.device
    return like(tensor, local.to(device, dtype or torch.promote_types(local.dtype, torch.float32), copy=True))
