"""Options of ``fully_shard`` as frozen values: precision, offload, resharding.

``MixedPrecisionPolicy``, ``OffloadPolicy`` and ``CPUOffloadPolicy`` keep the names, fields and meanings of
``torch.distributed.fsdp``. torch's own objects are accepted wherever ours are (see ``_api/torch_types.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar, cast

import torch
from torch import nn

from composable_fsdp.errors import ArgumentTypeError, ConfigurationError

__all__ = [
    "AUTO_RESHARD",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Reshard",
    "ReshardKind",
    "checks_keywords",
    "cpu_offload_by_budget",
]

_REDUCES_IN_GRADIENT_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""True if FSDP2 of the installed torch takes ``reduce_dtype=None`` for the dtype of the sharded gradient."""
_Callable = TypeVar("_Callable", bound=Callable[..., Any])


def checks_keywords(made: _Callable) -> _Callable:
    """Decorate a class or a function: the error for an unknown keyword tells the way out, or the most similar name."""
    call: Any = cast(Any, made).__init__ if isinstance(made, type) else made
    title, names = made.__name__, inspect.signature(call).parameters

    @functools.wraps(call)  # keeps the signature
    def checked(*args: Any, **given: Any) -> Any:
        for name in given.keys() - names:
            from composable_fsdp._other_names import REMOVED_KEYWORDS

            if removed := REMOVED_KEYWORDS.get((title, name)):
                raise ArgumentTypeError(f"{title} has no {name}= in this version: {removed}")
            raise ArgumentTypeError.of_keyword(title, name, names)
        return call(*args, **given)

    if not isinstance(made, type):
        return cast(_Callable, checked)
    made.__init__ = checked  # type: ignore[misc]
    return made


@checks_keywords
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a group's communication, computation, gradient reduction and outputs.

    Sharded parameters, and with them optimizer state and checkpoints, always keep their original dtype.

    Args:
        param_dtype: dtype of the unsharded floating-point parameters, and so of the all-gather and the computation;
            ``None`` keeps the original dtype. Integer and boolean parameters are never cast, nor are frozen ones of a
            subclass of ``nn.Parameter``, which may be packed. Parameters of a normalization with running statistics
            keep the dtype of these, if that is wider.
        reduce_dtype: dtype of the gradient reduction; ``None`` reduces as FSDP2 of the installed torch: up to 2.14 in
            the dtype of the computation, from 2.15 on in that of the sharded gradient (``grad_dtype``, by default the
            original dtype). With ``grad_dtype`` it is that by default.
            From 2.15 on, gradients of several dtypes in one group are all reduced in the widest of them.
        output_dtype: dtype to which floating-point tensors in the module's output are cast; ``None`` leaves them.
        cast_forward_inputs: cast floating-point tensors in the module's inputs to ``param_dtype``, if that is set.
        grad_dtype: dtype of gradients of floating-point parameters, as autograd computes them and as they are sharded;
            a ``grad_dtype`` of the parameter itself is preferred. ``None`` leaves autograd's in the dtype of the
            computation, and sharded ones in the original dtype. Operations of torch compute gradients in the dtype of
            the computation, and autograd then casts them; an autograd function of yours may return wider ones.
        param_dtype_override_fn: called once with each parameter in ``fully_shard``. It returns ``None`` or
            ``param_dtype``, or the original dtype of the parameter, which then computes in that. All ranks must return
            the same. Inputs are cast to ``param_dtype`` all the same.

    Raises:
        ArgumentTypeError: a dtype is no ``torch.dtype``.
        ConfigurationError: a dtype is not for floating-point or complex numbers; ``grad_dtype`` not for floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    grad_dtype: torch.dtype | None = None
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise ArgumentTypeError(f"{name} must be a torch.dtype such as torch.bfloat16, not {dtype!r}.")
            if not (dtype.is_floating_point or (dtype.is_complex and name != "grad_dtype")):
                raise ConfigurationError(
                    f"{name} must be a floating-point dtype, not {dtype}. To communicate parameters or gradients in "
                    "fewer bits, pass comm_policy=CommunicationPolicy(all_gather=Int8())."
                )

    def of_parameter(self, name: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        """Return the policy of ``parameter``: this one, with the answer of ``param_dtype_override_fn``.

        Raises:
            ConfigurationError: the answer is neither ``None``, ``param_dtype`` nor the parameter's dtype.
        """
        if self.param_dtype_override_fn is None:
            return self
        dtype = self.param_dtype_override_fn(parameter)
        if dtype not in (None, self.param_dtype, parameter.dtype):
            raise ConfigurationError(
                f"param_dtype_override_fn returned {dtype!r} for parameter {name!r}; it must return None, param_dtype "
                f"({self.param_dtype}), or the parameter's original dtype ({parameter.dtype})."
            )
        return replace(self, param_dtype=dtype or self.param_dtype, param_dtype_override_fn=None)

    def compute_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of an unsharded parameter whose shard has the dtype ``original``."""
        if self.param_dtype is None or not original.is_floating_point:
            return original
        return self.param_dtype

    def gradient_reduce_dtype(self, compute: torch.dtype, gradient: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which the gradients of a parameter are reduced.

        Args:
            compute: the dtype of the unsharded parameter.
            gradient: the dtype of the sharded gradient, or ``None`` for that of autograd's, whichever it is. They are
                reduced in fp32 or wider, since a rank without a gradient cannot know what arrives on others.
        """
        if not compute.is_floating_point:
            return compute
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        if gradient is None:
            return torch.promote_types(compute, torch.float32)
        return gradient if _REDUCES_IN_GRADIENT_DTYPE or self.grad_dtype is not None else compute

    @property
    def promotes(self) -> bool:
        """True if gradients of a group are all reduced in the widest of their dtypes, as FSDP2 from 2.15 on does."""
        return self.reduce_dtype is None and _REDUCES_IN_GRADIENT_DTYPE

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point inputs are cast, or ``None`` to leave them."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True)
class OffloadPolicy:
    """A policy without offload: shards are kept on the mesh's device."""


@checks_keywords
@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """A policy that keeps shards, their gradients and so the optimizer state in host memory.

    Computation stays on the mesh's device. On a CPU mesh the policy changes nothing.

    Args:
        pin_memory: keep the shards in page-locked memory, so that copies overlap with computation. It costs host memory
            that cannot be swapped.
    """

    pin_memory: bool = True


def cpu_offload_by_budget(
    module: torch.nn.Module, budget_bytes: int, *, pin_memory: bool = True
) -> dict[str, OffloadPolicy]:
    """Return an ``offload_policy`` that offloads the largest parameters of ``module``, up to ``budget_bytes``.

    Parameters are taken from the largest down, equal ones in the order of their names, until the next would exceed the
    budget. A larger budget adds parameters and removes none. Sizes are those of the full parameters.

    Args:
        module: the module that ``fully_shard`` is called with. Without ``policy=``, its parameters must not include
            those that earlier calls on modules inside have taken.
        budget_bytes: 0 offloads nothing.
        pin_memory: as of :class:`CPUOffloadPolicy`.

    Raises:
        ConfigurationError: ``budget_bytes`` is negative.
    """
    if budget_bytes < 0:
        raise ConfigurationError(f"budget_bytes must be non-negative, not {budget_bytes}.")
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in module.named_parameters()}
    chosen: dict[str, OffloadPolicy] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        budget_bytes -= sizes[name]
        if budget_bytes < 0:
            break
        chosen[name] = CPUOffloadPolicy(pin_memory)
    return chosen


@checks_keywords
@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data-parallel dims of a full mesh, for parameters that are DTensors on that mesh.

    Gradients are those of DDP: the mean of the gradients of each data-parallel rank's own loss. On these dims the local
    tensor of a gradient is taken for the gradient of that loss, whether its placement is ``Partial`` or ``Replicate``.

    Args:
        shard: dims over which parameters are sharded. Several names count as one axis.
        replicate: dims that hold the same shards. Several names count as one axis.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ConfigurationError("DataParallelMeshDims needs the name of a mesh dim in shard or replicate.")
        names = (*self.replicate_names, *self.shard_names)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigurationError(f"DataParallelMeshDims names {repeated} more than once.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


class ReshardKind(Enum):
    """The treatment of unsharded parameters after forward."""

    AUTO = "auto"
    """Free them, except in the outermost module, whose backward begins at once."""
    ALWAYS = "always"
    """Free them; backward all-gathers them again over the whole shard axis."""
    NEVER = "never"
    """Keep them until after backward."""
    SMALLER = "smaller"
    """Keep one slice of ``Reshard.mesh_size``; backward all-gathers over that many neighbouring ranks."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """The parsed ``reshard_after_forward``. Invariant: ``mesh_size`` > 1 exactly if ``kind`` is SMALLER."""

    kind: ReshardKind
    mesh_size: int = 1

    @staticmethod
    def parse(value: object, shard_size: int) -> Reshard:
        """Parse the ``bool | int | None`` of the public interface for a shard axis of ``shard_size`` ranks."""
        if value is None:
            return AUTO_RESHARD
        if isinstance(value, bool):
            return Reshard(ReshardKind.ALWAYS if value else ReshardKind.NEVER)
        if not isinstance(value, int):
            raise ArgumentTypeError(
                f"reshard_after_forward must be True, False, None or an int, not {value!r} ({type(value).__name__})."
            )
        if value < 1 or shard_size % value:
            factors = [n for n in range(1, shard_size + 1) if shard_size % n == 0]
            raise ConfigurationError(
                f"reshard_after_forward={value} does not divide the shard axis of {shard_size} ranks. "
                f"Use one of {factors}, True or False."
            )
        kind = {shard_size: ReshardKind.ALWAYS, 1: ReshardKind.NEVER}.get(value)
        return Reshard(ReshardKind.SMALLER, value) if kind is None else Reshard(kind)


AUTO_RESHARD = Reshard(ReshardKind.AUTO)
