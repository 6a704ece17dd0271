"""One sharded parameter: the DTensor at rest, and the tensor that modules compute with."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import FrameType
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import stateless
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from composable_fsdp._core.layout import TensorShards, take_shard
from composable_fsdp._core.memory import without_grad
from composable_fsdp._core.mesh import ParameterSharding, as_dtensor, as_dtensor_at_zero
from composable_fsdp.errors import LifecycleError, ParameterError
from composable_fsdp.policies import MixedPrecisionPolicy, OffloadPolicy

T = TypeVar("T")


def parameter_class(tensor: torch.Tensor) -> type[nn.Parameter]:
    """Return the class of ``tensor`` if it is a subclass of ``nn.Parameter``, else ``nn.Parameter``."""
    # isinstance() is True for any tensor marked as a parameter, whatever its class.
    return cast("type[nn.Parameter]", type(tensor)) if issubclass(type(tensor), nn.Parameter) else nn.Parameter


def as_parameter(value: torch.Tensor, kind: type[nn.Parameter], requires_grad: bool) -> nn.Parameter:
    """Return ``value`` as a parameter of class ``kind``, without calling its constructor.

    A tensor subclass stays what it is, as with ``nn.Parameter(value)``.
    """
    if kind is nn.Parameter or type(value) is not torch.Tensor:
        return nn.Parameter(value, requires_grad=requires_grad)
    return torch.Tensor._make_subclass(kind, value, requires_grad)


def is_wrapper(tensor: Any) -> bool:
    """Return True if the class of ``tensor`` implements ``__tensor_flatten__``."""
    return is_traceable_wrapper_subclass(tensor)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner plain tensors of ``tensor``, or ``tensor`` itself if it is plain."""
    if not is_wrapper(tensor):
        yield tensor
        return
    attributes, _ = cast(Any, tensor).__tensor_flatten__()
    for attribute in attributes:
        yield from plain_tensors(getattr(tensor, attribute))


def copy_shard(name: str, full: torch.Tensor, shards: TensorShards, rank: int, padded: torch.Tensor) -> None:
    """Copy the shard of ``rank`` of parameter ``name`` into ``padded``, a plain 1-d tensor of zeros.

    Raises:
        ParameterError: the class of ``full`` lacks an operation, which the error names.
    """
    way = {"narrow and copy_": lambda: take_shard(shards, full.detach(), rank, padded)}
    first_supported(name, full, "copied into a plain shard", way)


def first_supported(name: str, tensor: torch.Tensor, done: str, ways: Mapping[str, Callable[[], T]]) -> tuple[str, T]:
    """Return the name and the result of the first of ``ways`` that the class of ``tensor`` supports.

    Raises:
        ParameterError: it supports none. The error names the parameter, its class and the operations.
    """
    unsupported: dict[str, Exception] = {}
    for operation, way in ways.items():
        try:
            return operation, way()
        except Exception as error:  # noqa: PERF203 (one or two ways; classes refuse with errors of any type)
            if type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(error, torch.OutOfMemoryError):
                raise
            unsupported[operation] = error
    reasons = "; ".join(f"{operation}: {type(error).__name__}: {error}" for operation, error in unsupported.items())
    raise ParameterError(
        f"parameter {name!r} is a {type(tensor).__name__}, which cannot be {done}: {reasons}. Implement one of these "
        "operations for the class, or pass the parameter in ignored_params."
    ) from list(unsupported.values())[-1]


@dataclass(frozen=True)
class ParameterSource:
    """A parameter as ``fully_shard`` found it, its owners, and the sharding that it will have."""

    name: str
    tensor: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    sharding: ParameterSharding
    communication: Hashable | None = None
    offload: OffloadPolicy = OffloadPolicy()  # noqa: RUF009 (frozen)
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 (frozen)


_FUNCTIONAL_CALL = stateless._functional_call.__code__


def in_functional_call() -> bool:
    """Return whether ``torch.func.functional_call`` is on the Python stack."""
    running: FrameType | None = sys._getframe(1)
    while running is not None and running.f_code is not _FUNCTIONAL_CALL:
        running = running.f_back
    return running is not None


# Note: the tensors of a parameter
#
# A weight of shape (10, 4) on 4 ranks is, on rank 1:
#   sharded     nn.Parameter, a DTensor of global shape (10, 4), Shard(0). The optimizer and checkpoints hold it.
#   local       its local tensor, shape (3, 4): a view of the bucket's shard store, which is padded to 3 rows per rank.
#   full        shape (10, 4), a view of the bucket's unsharded buffer: freed by resize_(0), filled by an all-gather.
#   unsharded   nn.Parameter on ``full``: modules compute with it, and autograd saves it and adds gradients to it.
# Autograd saves ``unsharded`` and views of it, so the same storage object must be filled again before backward uses it.
# A write by an all-gather goes through ``.data`` of the buffer, which leaves the version counters of ``full`` alone;
# autograd would refuse a saved tensor whose counter has moved.
# A gradient goes unsharded.grad -> (cast, summed) ``accumulated`` -> message of the bucket -> sharded.grad.


class ShardedParameter:
    """One parameter of a parameter group.

    ``sharded`` is the ``nn.Parameter`` that users, optimizers and checkpoints see; its local tensor is a view of the
    shard store. ``unsharded`` is the parameter that modules compute with. Only ``unsharded`` is part of autograd's
    graph.
    Invariant: exactly one of the two is registered on all owners, unless they are hidden or hold a tensor of the user.

    ``shape`` is the shape of the tensor that the data-parallel axes shard: the full parameter, or the local tensor of a
    parameter that was a DTensor already.

    Args:
        source: the original parameter.
        local: this rank's shard.
    """

    def __init__(self, source: ParameterSource, local: torch.Tensor) -> None:
        tensor = source.tensor
        self.name = source.name
        self.sharding = source.sharding
        self.communication = source.communication
        self.offload, self.precision = source.offload, source.precision
        self.shape = tuple(local_part(tensor).shape)
        # Attributes of the user go along, but for those of a plain tensor that stands for a DTensor.
        inner = self.sharding.inner
        hidden = inner.form.attributes if inner is not None and inner.form is not None else ()
        self._attributes = {name: value for name, value in vars(tensor).items() if name not in hidden}
        self.kind = parameter_class(tensor)
        """The class of the original parameter. Modules may check it, e.g. for bitsandbytes' ``Params4bit``."""
        self.is_packed = self.kind is not nn.Parameter and not tensor.requires_grad
        """True if the bytes may be packed values, as in bitsandbytes' ``Params4bit``, whatever the dtype."""
        # The dtype of gradients: set on the tensor, or by the policy, or that of the parameter.
        grad_dtype = source.precision.grad_dtype
        default = _SAME_DTYPE if grad_dtype is None or not tensor.is_floating_point() else grad_dtype
        self._gradient_dtype = tensor.grad_dtype if has_grad_dtype(tensor) else default
        self.owners = source.owners
        self.state_ref: ref[Any] | None = None
        """A weak reference to the FSDP state, whose type this module does not import."""
        # Both forms are one until the first group is built.
        self.sharded = self.sharding.parameter(local, tensor.requires_grad)
        self.unsharded: nn.Parameter = self.sharded
        self.full = local
        """The plain tensor of ``unsharded``, a view of the unsharded buffer."""
        self.trainable = self.sharded.requires_grad
        """``requires_grad`` of both forms when the group last read it."""
        self.local = local
        self.accumulated: torch.Tensor | None = None
        self._held: ref[torch.Tensor] | None = None
        """A weak reference to the DTensor of ``accumulated`` that was returned last."""
        self.set_local(local)
        self._mark(self.sharded)

    def copy_onto(self, sharded: nn.Parameter, owners: Sequence[tuple[nn.Module, str]]) -> ShardedParameter:
        """Return a copy for ``sharded``, a copy of this one's parameter that is registered on copied modules."""
        copied = copy.copy(self)
        copied._attributes, copied.owners = dict(self._attributes), tuple(owners)
        copied.sharded = copied.unsharded = sharded
        copied.local = copied.full = cast(Any, sharded)._local_tensor
        copied.trainable, copied.accumulated = sharded.requires_grad, None
        copied.state_ref = copied._held = None
        copied._mark(sharded)
        return copied

    @property
    def owners(self) -> tuple[tuple[nn.Module, str], ...]:
        """The (module, attribute) pairs on which it is registered, without modules that were garbage-collected."""
        return tuple((module, name) for known, name in self._owners if (module := known()) is not None)

    @owners.setter
    def owners(self, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self._owners = tuple((ref(module), name) for module, name in owners)

    @property
    def description(self) -> str:
        """The properties besides the name that must be the same on every rank, as text."""
        sharding, kind, mesh = self.sharding, type(self.local).__name__, self.sharding.mesh
        parts = [
            f"{str(self.dtype).removeprefix('torch.')} {sharding.shape}",
            f"placed {sharding.placements} on a mesh of {tuple(mesh.shape)} {mesh.mesh_dim_names or ''}",
            "" if kind == "Tensor" else f"a {kind}",
            "" if self.sharded.requires_grad else "frozen",
            "" if self.sharding.axes.divide is None else f"divided by {self.sharding.axes.divide}",
            "" if self.communication is None else str(self.communication),
            "" if self.offload == OffloadPolicy() else str(self.offload),
            "" if self.precision == MixedPrecisionPolicy() else str(self.precision),
        ]
        return ", ".join(filter(None, map(str.rstrip, parts)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sharded parameter."""
        return self.local.dtype

    @property
    def dim(self) -> int:
        """The tensor dim that the data-parallel axes shard."""
        return self.sharding.dim

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the all-gather and of the unsharded parameter.

        It is the dtype of ``precision`` with two exceptions. Packed bytes are never cast. Parameters of a normalization
        with running statistics get the dtype of the statistics if it is wider: torch's kernels take 16-bit inputs with
        fp32 parameters and statistics, but no 16-bit parameters with fp32 statistics.
        """
        if self.is_packed:
            return self.dtype
        dtype = self.precision.compute_dtype(self.dtype)
        if self.precision.param_dtype is not None and dtype.is_floating_point:
            for module, _ in self.owners:
                if isinstance(module, _NormBase) and module.running_mean is not None:
                    statistics = module.running_mean.dtype
                    return statistics if statistics.itemsize > dtype.itemsize else dtype
        return dtype

    @property
    def has_grad_dtype(self) -> bool:
        """True if the user has set ``grad_dtype``, which then stays what it is if the parameter is converted."""
        return self._gradient_dtype is not _SAME_DTYPE

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the sharded gradient, or ``None`` for that of autograd's, whichever it is."""
        return self.dtype if self._gradient_dtype is _SAME_DTYPE else self._gradient_dtype

    def check_grad_dtype(self) -> None:
        """Raise a ``LifecycleError`` if ``grad_dtype`` of the sharded parameter was changed after sharding."""
        found, dtype = self.sharded.grad_dtype, self.sharded.dtype
        expected = dtype if self._gradient_dtype is _SAME_DTYPE else self._gradient_dtype
        if found != expected and cast(Any, self.sharded)._local_tensor is self.local:  # a conversion resets it
            raise LifecycleError(
                f"grad_dtype of parameter {self.name!r} was changed after fully_shard, from {expected} to {found}. Set "
                "it before fully_shard, or pass mp_policy=MixedPrecisionPolicy(grad_dtype=...)."
            )

    def set_local(self, local: torch.Tensor) -> None:
        """Make ``local``, a view of the shard store, the local tensor of the sharded parameter."""
        self.local = local
        cast(Any, self.sharded)._local_tensor = local

    @property
    def local_now(self) -> torch.Tensor:
        """The local tensor of the registered parameter, which may have replaced the one that the group knows."""
        registered: Any = self._first_other_registered()
        if registered is self.sharded:
            return local_part(registered)
        if registered is self.unsharded or not isinstance(registered, DTensor) or in_functional_call():
            return self.local
        return local_part(registered)

    @property
    def was_flipped(self) -> bool:
        """True if a user changed ``requires_grad`` of either form since the group last read it."""
        return not (self.sharded.requires_grad == self.unsharded.requires_grad == self.trainable)

    def adopt_replacement(self) -> bool:
        """Take over a parameter or local tensor that a user put in place of the group's, e.g. by ``to_empty``.

        Returns True if the registered tensor is a value that ``functional_call`` was given, which stays registered.

        Raises:
            ParameterError: the registered tensor is not a DTensor with the sharding of this parameter.
        """
        registered: Any = self._first_other_registered()
        if registered is self.unsharded:
            return False
        if registered is self.sharded:
            # ``to`` and ``to_empty`` swap tensors, and with them their attributes and ``grad_dtype``.
            self._carry_attributes(registered)
            return False
        if in_functional_call():
            return True
        # Another tensor is registered: it must be a DTensor with this sharding.
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
        # It may belong to another group, as tied weights do.
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
        return False

    def build_unsharded(self, data: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Create the unsharded parameter, with the hook ``on_gradient``, from a view of the unsharded buffer."""
        self.trainable = self.sharded.requires_grad
        self.full = data
        self.unsharded = as_parameter(self.sharding.wrap_full(data), self.kind, self.trainable)
        _by_tensor_id[id(self.unsharded)] = self
        self._carry_attributes(self.unsharded)
        if self.unsharded.requires_grad:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)

    def show(self, data: torch.Tensor) -> None:
        """Let the unsharded parameter use ``data``, a copy in other memory. Its hooks and gradients stay."""
        for tensor in (self.full, local_part(self.unsharded)):
            tensor.data = data

    def sync_requires_grad(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Set ``requires_grad`` of the unsharded parameter to that of the sharded one."""
        self.trainable = self.sharded.requires_grad
        if self.unsharded is self.sharded:  # it was never all-gathered
            return
        if self.unsharded.requires_grad != self.trainable:  # torch.func forbids the call in a transform
            self.unsharded.requires_grad_(self.trainable)
        if self.trainable and not cast(Any, self.unsharded)._post_accumulate_grad_hooks:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)

    def accumulate_gradient(self, dtype: torch.dtype) -> None:
        """Keep this microbatch's gradient for a later reduction, summed in ``dtype``.

        Plain gradients of ``dtype`` stay in ``unsharded.grad``, where autograd adds the next one. DTensor gradients do
        not: a partial and a replicated one must be added as local tensors, and the gradients of two parameters may
        share memory, to which autograd would write twice. They are copied.
        """
        gradient = self.unsharded.grad
        if gradient is None or self.unsharded is self.sharded:  # the latter if it was never all-gathered
            return
        is_summed = self.accumulated is not None or self.sharding.inner is not None
        if gradient.dtype == dtype and not gradient.is_sparse and not is_summed:
            return
        is_first = self.accumulated is None
        (total,) = take_gradients((self,), dtype)
        assert total is not None
        self.accumulated = total.to(dtype, copy=True) if is_first else total

    @property
    def held_gradient(self) -> torch.Tensor | None:
        """This rank's full gradient that is not reduced yet, a ``DTensor`` on a model-parallel mesh, or ``None``."""
        if self.unsharded is self.sharded:  # it was never all-gathered
            return None
        held, inner = self.accumulated, self.sharding.inner
        if held is None or inner is None:
            return self.unsharded.grad if held is None else held
        known = None if self._held is None else self._held()
        if known is None or local_part(known).data_ptr() != held.data_ptr():  # it is a view
            known = as_dtensor(held, inner.mesh, inner.placements, inner.shape)
            self._held = ref(known)
        return known

    def drop_gradient(self) -> None:
        """Drop gradients that were not reduced."""
        if self.unsharded is self.sharded:  # it was never all-gathered
            return
        self.unsharded.grad = self.accumulated = None

    def _first_other_registered(self) -> nn.Parameter | None:
        """Return the parameter registered now: the first that is not ``sharded``, or ``None`` if it was deleted."""
        for module, name in self.owners:
            registered = module._parameters.get(name)
            if registered is not self.sharded:
                return registered
        return self.sharded

    def _mark(self, parameter: nn.Parameter) -> None:
        """Record ``parameter`` as a form of this sharded parameter, and give it the user's attributes."""
        _by_tensor_id[id(parameter)] = self
        self._carry_attributes(parameter)
        if self._gradient_dtype is _SAME_DTYPE and parameter.grad_dtype != parameter.dtype:
            parameter.grad_dtype = parameter.dtype

    def _carry_attributes(self, parameter: nn.Parameter) -> None:
        """Give ``parameter`` the user's attributes, and the ``grad_dtype`` if the user has set one."""
        if self._gradient_dtype is not _SAME_DTYPE:
            parameter.grad_dtype = self._gradient_dtype
        for name, value in self._attributes.items():
            if name not in vars(parameter):
                setattr(parameter, name, value)


without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""A context manager that disables ``__torch_function__``. It halves the time of reading an attribute of a DTensor."""
_with_torch_function: Any = torch._C._EnableTorchFunction
"""A context manager that enables ``__torch_function__`` again inside :data:`without_torch_function`."""

_SAME_DTYPE: Any = object()
"""A marker for a ``grad_dtype`` that nobody has set: it is the dtype of the parameter, also after a conversion."""

_by_tensor_id: WeakValueDictionary[int, ShardedParameter] = WeakValueDictionary()
"""The sharded parameters by the ``id`` of either form. Never iterated: other threads may change it meanwhile.

Keys are no weak references, since ``torch.utils.swap_tensors``, which converts modules, rejects tensors that have any.
An ``id`` may belong to an earlier tensor, so :func:`find_parameter` compares the object.
"""


def take_gradients(parameters: Iterable[ShardedParameter], sum_dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Remove and return this rank's full gradients, accumulated microbatches included, ``None`` where there is none.

    Args:
        parameters: the parameters of a bucket, in one loop.
        sum_dtype: the dtype for pending sums over model-parallel axes.
    """
    gradients = []
    for parameter in parameters:
        unsharded = parameter.unsharded
        gradient, unsharded.grad = unsharded.grad, None
        if gradient is not None and gradient.is_sparse:  # of an embedding: a message has the elements of all parameters
            gradient = gradient.to_dense()
        inner = parameter.sharding.inner
        if gradient is not None and inner is not None:
            gradient = inner.local_gradient(gradient, sum_dtype)
        if parameter.accumulated is not None:
            accumulated, parameter.accumulated = parameter.accumulated, None
            gradient = accumulated if gradient is None else accumulated.add_(gradient)
        gradients.append(gradient)
    return gradients


@without_grad
def accept_gradients(parameters: Iterable[ShardedParameter], shards: Iterable[torch.Tensor]) -> None:
    """Set or add this rank's shards of the reduced gradients, then call the user's hooks on each sharded parameter.

    One loop for all parameters: a method call for each takes as long as the rest of what Python does.
    """
    new = DTensor.__new__  # ``DTensor(...)`` also calls an ``__init__`` that does nothing and doubles the cost
    with without_torch_function():
        for parameter, local in zip(parameters, shards, strict=True):
            sharded: Any = parameter.sharded
            # A gradient is a DTensor like its parameter, maybe in another dtype.
            spec = sharded._spec
            if parameter._gradient_dtype is not _SAME_DTYPE and local.dtype != spec.tensor_meta.dtype:
                spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
            gradient: Any = new(DTensor, local, spec, requires_grad=False)
            if sharded._backward_hooks:
                with _with_torch_function():
                    for hook in tuple(sharded._backward_hooks.values()):
                        replacement = hook(gradient)
                        gradient = gradient if replacement is None else replacement
            # Set it, or add it to that of earlier microbatches.
            if sharded.grad is None:
                sharded.grad = gradient
            else:
                sharded.grad._local_tensor.add_(gradient._local_tensor)
            if sharded._post_accumulate_grad_hooks:
                with _with_torch_function():
                    for hook in tuple(sharded._post_accumulate_grad_hooks.values()):
                        hook(sharded)


def has_grad_dtype(tensor: torch.Tensor) -> bool:
    """Return True if ``grad_dtype`` of ``tensor``, a leaf, was set, be it to the dtype that it has without.

    Torch up to 2.13 does not tell, so ``tensor`` gets data of another dtype for a moment: a dtype that was set stays.
    """
    if tensor.grad_dtype != tensor.dtype:
        return True
    known = getattr(tensor, "_has_grad_dtype_override", None)
    if known is not None:
        return bool(known)
    if not tensor.is_floating_point() or type(local_part(tensor)) not in (torch.Tensor, nn.Parameter):
        return False
    data = tensor.data
    try:
        tensor.data = data.new_empty(0, dtype=torch.float32 if data.dtype == torch.float64 else torch.float64)
        return tensor.grad_dtype != tensor.dtype
    finally:
        tensor.data = data


def find_parameter(tensor: object) -> ShardedParameter | None:
    """Return the sharded parameter of which ``tensor`` is either form, or ``None``."""
    found = _by_tensor_id.get(id(tensor))
    return found if found is not None and (found.sharded is tensor or found.unsharded is tensor) else None


def find_unsharded(tensors: Iterable[torch.Tensor]) -> ShardedParameter | None:
    """Return a parameter whose unsharded form is among ``tensors``, or ``None``."""
    found = ((tensor, find_parameter(tensor)) for tensor in tensors)
    return next((p for tensor, p in found if p is not None and p.sharded is not tensor), None)


@dataclass(frozen=True)
class ReplacedParameter:
    """The sharded parameter that replaced an original one, and its description."""

    parameter: ref[ShardedParameter]
    description: str


_taken: MutableMapping[torch.Tensor, ReplacedParameter] = WeakIdKeyDictionary()
"""The replacement of each original parameter. Finds parameters shared across groups and outdated optimizers."""


def note_replaced(source: ParameterSource, parameter: ShardedParameter, group: str) -> None:
    """Record that ``parameter`` replaced the original parameter of ``source``."""
    _taken[source.tensor] = ReplacedParameter(ref(parameter), f"{source.name!r} of {group}")


def find_replaced(original: torch.Tensor) -> ReplacedParameter | None:
    """Return the replacement of the parameter ``original``, or ``None`` if no group sharded it."""
    return _taken.get(original)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def alias_of(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor like ``sharded`` in the memory of ``local`` that ``copy.deepcopy`` can copy.

    The result of ``detach`` cannot be copied if ``local`` has a storage offset.
    """
    return as_dtensor_at_zero(local, sharded._spec)


# Several threads may step at once. ``+= 1`` could then give one number twice, and a reader that knew this number would
# miss the second step. ``itertools.count`` gives each number once.
_count = count(1)
_steps = 0


class OptimizerSteps:
    """The ``number`` of steps of the optimizers that hold parameters of one root, or their local shards.

    A step inside a step of the same optimizer, as that of a base class, counts as another one.
    """

    def __init__(self) -> None:
        self.number = 0

    def note(self) -> None:
        """Count one step."""
        self.number += 1


def note_optimizer_step(sharded: Sequence[torch.Tensor]) -> None:
    """Count an optimizer step, and bump the versions of those ``sharded`` parameters that have a gradient."""
    global _steps
    _steps = next(_count)
    if sharded:
        increment_version([p for p in sharded if p.grad is not None])


def optimizer_steps() -> int:
    """Return the number of steps of all optimizers of this process since the hooks were installed."""
    return _steps
