"""One parameter in its two forms: the sharded one at rest, the unsharded one while modules compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import WeakIdKeyDictionary

from composable_fsdp._consistency.starting_values import Start
from composable_fsdp._layout.bucket_layout import ALIGNMENT_BYTES
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._runtime.params.tensor_subclass import as_parameter, parameter_class
from composable_fsdp._sharding.param_sharding import ParameterSharding
from composable_fsdp.codecs.communication_policy import CommunicationPolicy, GradientCodecs
from composable_fsdp.codecs.error_feedback import without_feedback
from composable_fsdp.codecs.protocol import Codec, CodecPerParameter, resolve_codec
from composable_fsdp.errors import ParameterError
from composable_fsdp.policies import MixedPrecisionPolicy

__all__ = [
    "ParameterSource",
    "ShardedParameter",
    "Taken",
    "alias_of",
    "find_parameter",
    "find_taken",
    "find_unsharded",
    "local_part",
    "note_taken",
    "plain_access",
]


@dataclass(frozen=True)
class ParameterSource:
    """A parameter as ``fully_shard`` found it: where it is registered, and how it is to be cut."""

    name: str
    tensor: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    sharding: ParameterSharding
    communication: CommunicationPolicy = field(default_factory=CommunicationPolicy)


class ShardedParameter:
    """One parameter of a group.

    ``sharded`` is the ``nn.Parameter`` that users, optimizers and checkpoints see; its local tensor is a view of the
    group's shard store. ``unsharded`` is what modules compute with; it is on autograd's graph, ``sharded`` never is.
    Invariant: exactly one of the two is registered on all owners.

    ``shape`` is that of what the data-parallel axes cut: the whole parameter, or this rank's part of it where it was a
    DTensor before.
    """

    def __init__(self, source: ParameterSource, local: torch.Tensor) -> None:
        tensor = source.tensor
        self.name = source.name
        self.sharding = source.sharding
        self.communication = source.communication
        self.shape = tuple(local_part(tensor).shape)
        self._attributes = dict(vars(tensor))
        self.kind = parameter_class(tensor)
        """Class that the parameter had before it was sharded: modules ask for it, such as bitsandbytes' Linear4bit."""
        self._is_packed = self.kind is not nn.Parameter and not tensor.requires_grad
        """Whether the bytes may be packed values, as those of bitsandbytes' ``Params4bit``, whatever their dtype."""
        self._gradient_dtype = tensor.grad_dtype if tensor.grad_dtype != tensor.dtype else _SAME
        self.owners = source.owners
        self.held_by: ref[Any] | None = None
        """The unit, of which this module knows no more."""
        self.sharded = nn.Parameter(self.sharding.wrap_shard(local), requires_grad=tensor.requires_grad)
        self.unsharded: nn.Parameter = self.sharded
        self.full = local
        """The plain tensor in ``unsharded``: a view of the unsharded buffer."""
        self.trainable = self.sharded.requires_grad
        """``requires_grad`` of both forms, as far as the group took note of it."""
        self.local = local
        self.accumulated: torch.Tensor | None = None
        self.start: Start | None = None
        """Samples of the values that were cut, until ranks have compared them in the first forward."""
        self.set_local(local)
        self._mark(self.sharded)

    def copy_onto(self, sharded: nn.Parameter, owners: Sequence[tuple[nn.Module, str]]) -> ShardedParameter:
        """The same for ``sharded``, a copy of this one's sharded parameter, registered on copies of the modules."""
        copy = object.__new__(ShardedParameter)
        copy.name, copy.sharding, copy.shape = self.name, self.sharding, self.shape
        copy.communication = self.communication
        copy._attributes, copy._gradient_dtype = dict(self._attributes), self._gradient_dtype
        copy.kind, copy._is_packed = self.kind, self._is_packed
        copy.owners = owners
        copy.sharded = copy.unsharded = sharded
        copy.local = copy.full = cast(Any, sharded)._local_tensor
        copy.trainable, copy.accumulated = sharded.requires_grad, None
        copy.start = copy.held_by = None
        copy._mark(sharded)
        return copy

    @property
    def owners(self) -> tuple[tuple[nn.Module, str], ...]:
        """Where it is registered: modules and attributes, without modules that were dropped since."""
        return tuple((module, name) for known, name in self._owners if (module := known()) is not None)

    @owners.setter
    def owners(self, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self._owners = tuple((ref(module), name) for module, name in owners)

    @property
    def description(self) -> str:
        """What must be the same on every rank besides the name, for comparison and for people."""
        sharding, kind, mesh = self.sharding, type(self.local).__name__, self.sharding.mesh
        parts = [
            f"{str(self.dtype).removeprefix('torch.')} {sharding.shape}",
            f"placed {sharding.placements} on a mesh of {tuple(mesh.shape)} {mesh.mesh_dim_names or ''}",
            "" if kind == "Tensor" else f"a {kind}",
            "" if self.sharded.requires_grad else "frozen",
            "" if self.communication == CommunicationPolicy() else str(self.communication),
        ]
        return ", ".join(filter(None, map(str.rstrip, parts)))

    @property
    def dtype(self) -> torch.dtype:
        """dtype in which the parameter rests."""
        return self.local.dtype

    @property
    def dim(self) -> int:
        """Tensor dim on which the data-parallel axes cut."""
        return self.sharding.dim

    @property
    def cut_by(self) -> frozenset[str | int]:
        """Model-parallel mesh axes that cut it too. Along all others ranks hold copies of what the shard axis cuts."""
        inner = self.sharding.inner
        if inner is None:
            return frozenset()
        names: Sequence[str | int] = inner.mesh.mesh_dim_names or range(inner.mesh.ndim)
        axes = zip(names, inner.mesh.shape, inner.placements, strict=True)
        return frozenset(name for name, size, placement in axes if size > 1 and not placement.is_replicate())

    @property
    def gather_codec(self) -> Codec | None:
        """How the shards travel, if there is anywhere to travel to and the parameter is not too small."""
        codec = self.communication.all_gather
        if codec is None or not self._is_encoded or self.sharding.axes.shard.size == 1:
            return None
        return resolve_codec(codec, self._largest_shard)

    @property
    def gradient_codecs(self) -> GradientCodecs:
        """How the gradient travels, where there is anywhere to travel to and the parameter is not too small."""
        chosen, axes = self.communication, self.sharding.axes
        return GradientCodecs(
            chosen.reduce_scatter if self._is_encoded and axes.shard.size > 1 else None,
            chosen.all_reduce if self._is_encoded and axes.replicate.size > 1 else None,
        ).for_parameter(self._largest_shard)

    @property
    def travels_alone(self) -> bool:
        """Whether a codec that counts rows would lose step behind it in a message, where it is filled up with zeros."""
        chosen = self.communication
        codecs = (chosen.all_gather, *map(without_feedback, (chosen.reduce_scatter, chosen.all_reduce)))
        chosen_ones = [codec for codec in codecs if codec is not None]
        if not chosen_ones or not self._is_encoded or not any(isinstance(c, CodecPerParameter) for c in chosen_ones):
            return False
        return prod(self._largest_shard) % ALIGNMENT_BYTES != 0

    @property
    def _largest_shard(self) -> tuple[int, ...]:
        return TensorShards(self.shape, self.dim, self.sharding.axes.shard.size).padded_shape

    @property
    def _is_encoded(self) -> bool:
        is_number = self.dtype.is_floating_point and not self._is_packed
        return is_number and prod(self.shape) >= self.communication.min_numel

    def compute_dtype(self, precision: MixedPrecisionPolicy) -> torch.dtype:
        """dtype in which the parameter is gathered and modules compute with it.

        It is not always that of ``precision``. Packed bytes are never cast. Parameters of a normalization with running
        statistics have the dtype of these, if that is the wider one: torch's kernels take 16-bit inputs with fp32
        parameters and statistics, but no 16-bit parameters with fp32 statistics.
        """
        if self._is_packed:
            return self.dtype
        dtype = precision.compute_dtype(self.dtype)
        if precision.param_dtype is not None and dtype.is_floating_point:
            for module, _ in self.owners:
                if isinstance(module, _NormBase) and module.running_mean is not None:
                    statistics = module.running_mean.dtype
                    return statistics if statistics.itemsize > dtype.itemsize else dtype
        return dtype

    def gradient_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        """dtype of the reduced gradient: the parameter's own, unless its ``grad_dtype`` was set to another, or none."""
        if self._gradient_dtype is _SAME:
            return self.dtype
        return cast("torch.dtype | None", self._gradient_dtype) or reduce_dtype

    def set_local(self, local: torch.Tensor) -> None:
        """Makes ``local``, a view of the shard store, the sharded parameter's memory."""
        self.local = local
        cast(Any, self.sharded)._local_tensor = local

    @property
    def local_now(self) -> torch.Tensor:
        """The local tensor of what is registered in the sharded parameter's place, which the group may not know yet."""
        registered = self._registered()
        return self.local if registered is None or registered is self.unsharded else local_part(registered)

    @property
    def was_flipped(self) -> bool:
        """Whether somebody froze or thawed the parameter, in either form, since the group last took note."""
        return not (self.sharded.requires_grad == self.unsharded.requires_grad == self.trainable)

    def adopt_replacement(self) -> None:
        """Takes over what somebody else registered or put in place of the local tensor (``to_empty``, ``assign``).

        Raises:
            ParameterError: what is registered now is not a DTensor sharded as this parameter is.
        """
        registered: Any = self._registered()
        if registered is self.unsharded:
            return
        if registered is self.sharded:
            # A conversion (``to``, ``to_empty``) swaps these away with the tensor.
            self._carry_attributes(registered)
            if self._gradient_dtype is not _SAME and registered.grad is None:
                registered.grad_dtype = self._gradient_dtype
            return
        old, new = cast(Any, self.sharded), registered
        if not isinstance(new, DTensor) or not isinstance(new, nn.Parameter):
            raise ParameterError(
                f"parameter {self.name!r} was replaced after sharding by a {type(registered).__name__}, which is not a "
                "sharded parameter. Change it in place (p.copy_(...) under torch.no_grad()), or replace it before "
                "fully_shard."
            )
        if new.shape != old.shape or new.device_mesh != old.device_mesh or new.placements != old.placements:
            raise ParameterError(
                f"parameter {self.name!r} was replaced after sharding by a DTensor of shape {tuple(new.shape)} with "
                f"{new.placements} on {new.device_mesh}; expected shape {tuple(old.shape)} with {old.placements} on "
                f"{old.device_mesh}."
            )
        other = find_parameter(new)
        if other is not None and other is not self and other.sharded is new:
            raise ParameterError(
                f"parameter {self.name!r} and parameter {other.name!r} of another group have become the same tensor "
                "(tied weights?). Tie them before the first forward; where they are cut differently, before "
                "fully_shard, and shard the modules that use them as one list, or give the second call "
                "shared_from=[...]."
            )
        self.sharded = new
        self._mark(new)

    def build_unsharded(self, data: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Makes the parameter that modules compute with out of ``data``, a view of the unsharded buffer."""
        self.trainable = self.sharded.requires_grad
        self.full = data
        self.unsharded = as_parameter(self.sharding.wrap_full(data), self.kind, self.trainable)
        _by_form[id(self.unsharded)] = self
        self._carry_attributes(self.unsharded)
        if self._gradient_dtype is not _SAME:
            self.unsharded.grad_dtype = self._gradient_dtype
        if self.unsharded.requires_grad:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)

    def show(self, data: torch.Tensor) -> None:
        """Makes modules compute with ``data``, which has the same values in other memory. Hooks and gradients stay."""
        for tensor in (self.full, local_part(self.unsharded)):
            tensor.data = data

    def follow_requires_grad(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Freezes or thaws the unsharded parameter after the sharded one."""
        self.trainable = self.sharded.requires_grad
        if self.unsharded is self.sharded:  # never gathered so far
            return
        self.unsharded.requires_grad_(self.trainable)
        if self.trainable and not cast(Any, self.unsharded)._post_accumulate_grad_hooks:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)

    def take_gradient(self, sum_dtype: torch.dtype) -> torch.Tensor | None:
        """The full gradient that this rank has, accumulated microbatches included; it is no longer here afterwards.

        Args:
            sum_dtype: in which pending sums over model-parallel axes are carried out.
        """
        unsharded = self.unsharded
        gradient, unsharded.grad = unsharded.grad, None
        inner = self.sharding.inner
        if gradient is not None and inner is not None:
            gradient = inner.local_gradient(gradient, sum_dtype)
        if self.accumulated is None:
            return gradient
        accumulated, self.accumulated = self.accumulated, None
        return accumulated if gradient is None else accumulated.add_(gradient)

    def hold_gradient(self, dtype: torch.dtype) -> None:
        """Keeps this microbatch's gradient for a later reduction, summed in ``dtype``.

        Autograd adds plain gradients of ``dtype`` by itself, but DTensors wrongly. On a data-parallel axis a partial
        and a replicated one must be added as the local tensors that they are. And the gradients of two parameters may
        be DTensors in the same memory, to which autograd would write once for each. So these are copied.
        """
        gradient = self.unsharded.grad
        if gradient is None:
            return
        if gradient.dtype == dtype and self.accumulated is None and self.sharding.inner is None:
            return
        is_first = self.accumulated is None
        total = self.take_gradient(dtype)
        assert total is not None
        self.accumulated = total.to(dtype, copy=True) if is_first else total

    def accept_gradient(self, local: torch.Tensor) -> None:
        """Sets or adds this rank's shard of the reduced gradient, then calls the hooks that users registered for it.

        May be called within :data:`plain_access`, in which the hooks are not.
        """
        sharded: Any = self.sharded
        spec = sharded._spec
        if self._gradient_dtype is not _SAME:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        # ``DTensor(...)`` does this too, and then calls an ``__init__`` that costs twice as much and does nothing.
        gradient: Any = DTensor.__new__(DTensor, local, spec, requires_grad=False)
        hooks = sharded._backward_hooks
        for hook in tuple(hooks.values()) if hooks else ():
            with _usual_access():
                replacement = hook(gradient)
            gradient = gradient if replacement is None else replacement
        held = sharded.grad
        if held is None:
            sharded.grad = gradient
        else:
            held._local_tensor.add_(gradient._local_tensor)
        hooks = sharded._post_accumulate_grad_hooks
        for hook in tuple(hooks.values()) if hooks else ():
            with _usual_access():
                hook(sharded)

    def drop_gradient(self) -> None:
        """Forgets gradients that have not been reduced."""
        if self.unsharded is self.sharded:  # never gathered so far
            return
        self.unsharded.grad = self.accumulated = None

    def _registered(self) -> nn.Parameter | None:
        """What is in the sharded parameter's place now, at whichever owner; ``None`` if somebody deleted it."""
        for module, name in self.owners:
            registered = module._parameters.get(name)
            if registered is not self.sharded:
                return registered
        return self.sharded

    def _mark(self, parameter: nn.Parameter) -> None:
        """Makes ``parameter`` show that it is this sharded parameter."""
        _by_form[id(parameter)] = self
        self._carry_attributes(parameter)
        if self._gradient_dtype is not _SAME:
            parameter.grad_dtype = self._gradient_dtype

    def _carry_attributes(self, parameter: nn.Parameter) -> None:
        for name, value in self._attributes.items():
            if name not in vars(parameter):
                setattr(parameter, name, value)


plain_access: Any = torch._C.DisableTorchFunctionSubclass
"""Within it, attributes of a DTensor are read in half of the time, or less."""
_usual_access: Any = torch._C._EnableTorchFunction
"""Ends it, within it."""

_SAME: Any = object()
"""The ``grad_dtype`` of a parameter whose gradients have its own dtype."""

_by_form: WeakValueDictionary[int, ShardedParameter] = WeakValueDictionary()
"""By the ids of their sharded and unsharded forms. It is never iterated, since other threads may change it meanwhile.

Weak references to the tensors are not possible: ``torch.utils.swap_tensors``, with which modules are converted, refuses
tensors that have any. An id may have been that of an earlier tensor.
"""


def find_parameter(tensor: object) -> ShardedParameter | None:
    """The one that ``tensor`` is a form of, if any."""
    found = _by_form.get(id(tensor))
    return found if found is not None and (found.sharded is tensor or found.unsharded is tensor) else None


def find_unsharded(tensors: Iterable[torch.Tensor]) -> ShardedParameter | None:
    """One whose unsharded form is among ``tensors``, if any."""
    found = ((tensor, find_parameter(tensor)) for tensor in tensors)
    return next((p for tensor, p in found if p is not None and p.sharded is not tensor), None)


@dataclass(frozen=True)
class Taken:
    """What became of a parameter that a group took."""

    parameter: ref[ShardedParameter]
    description: str


_taken: MutableMapping[torch.Tensor, Taken] = WeakIdKeyDictionary()
"""Original parameters that a group replaced: whoever still holds one shares it across groups, or steps it in vain."""


def note_taken(source: ParameterSource, parameter: ShardedParameter, group: str) -> None:
    """Remembers that ``parameter`` has taken the place of the one found in ``source``."""
    _taken[source.tensor] = Taken(ref(parameter), f"{source.name!r} of {group}")


def find_taken(original: torch.Tensor) -> Taken | None:
    """What became of ``original``, if a group took it."""
    return _taken.get(original)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


def alias_of(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like ``sharded`` in the memory of ``local``, of which ``copy.deepcopy`` makes one with its own.

    Of what ``detach`` gives it does not, where ``local`` is a view that begins later than its storage: the DTensor then
    says that it begins there too, but has no storage.
    """
    spec = cast(Any, sharded)._spec
    if type(local) is not torch.Tensor:
        return DTensor(local, spec, requires_grad=False)
    alias = DTensor(local.new_empty(0), spec, requires_grad=False)
    cast(Any, alias)._local_tensor = local
    return alias
