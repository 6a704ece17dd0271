"""``FSDPModule``: what a sharded module can do besides what it could before."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from torch import nn

from composable_fsdp.errors import ConfigurationError, UnsupportedError
from composable_fsdp.interop import TorchFSDPModule, TorchUnshardHandle
from composable_fsdp.policy import Reshard
from composable_fsdp.runtime.assemble import iteration_of
from composable_fsdp.runtime.unit import Unit, find_unit, unit_of

__all__ = ["FSDPModule", "UnshardHandle", "sharded_class"]


class UnshardHandle(TorchUnshardHandle):
    """An all-gather in flight, from ``FSDPModule.unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Makes the unsharded parameters usable. Waiting twice is waiting once."""
        if self._unit is not None:
            self._unit.group.wait()
            self._unit = None


class FSDPModule(TorchFSDPModule):
    """Mixed into the class of every module that ``fully_shard`` was applied to.

    Names and meanings are those of ``torch.distributed.fsdp.FSDPModule``. A setter counts from the next forward or
    backward; with ``recurse`` it also reaches the sharded modules below this one.
    """

    _orig_cls_mro_index = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds the *original* class, so that indexing or slicing a sharded container gives a plain one."""
        return cls.__mro__[cls._orig_cls_mro_index](*args, **kwargs)

    # -- parameters in and out of memory

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers this module's own group, without those of modules below it.

        Args:
            async_op: return at once with a handle; the module's next forward waits for it if nobody else did.
        """
        unit = _unit(self)
        unit.group.unshard(iteration_of(unit).lanes)
        unit.kept_version = unit.group.tensors.version
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's unsharded parameters. Without effect where they are sharded already."""
        _unit(self).group.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: back to where a new step can begin.

        Completes collectives in flight, shards every group of the root again, and drops gradients that have not been
        reduced, those accumulated with ``set_requires_gradient_sync(False)`` included. Reduced gradients stay: call
        ``zero_grad`` as usual.
        """
        iteration_of(_unit(self)).reset()

    # -- when to reshard and what to prefetch

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free parameters after forward and gather them again in backward.

        Raises:
            ConfigurationError: not a ``bool``. A smaller mesh is chosen by ``fully_shard(reshard_after_forward=n)``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigurationError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}; to reshard to a smaller mesh, "
                "pass an int as fully_shard(reshard_after_forward=...)."
            )
        for unit in _units(self, recurse):
            unit.reshard = Reshard.parse(reshard_after_forward, unit.group.axes.shard.size)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free parameters after backward. Kept ones are gathered anew once an optimizer has stepped."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Modules to all-gather when this one begins its forward, in place of those known from the last iteration."""
        _unit(self).forward_prefetch = _prefetch_units("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Modules to all-gather when this one begins its backward, in place of the one before it in forward."""
        _unit(self).backward_prefetch = _prefetch_units("backward", modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the parameters; an embedding's does not, which saves its second all-gather."""
        _unit(self).unshard_in_backward = unshard_in_backward

    # -- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Where it does not, they are summed unsharded, in the reduce dtype."""
        for unit in _units(self, recurse):
            unit.gradient_sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward waits for reductions in flight; without it, the next backward's does."""
        iteration_of(_unit(self)).is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the summed gradients of this module's group by ``factor`` instead of by the number of ranks."""
        if factor <= 0:
            raise ConfigurationError(f"the gradient divide factor must be positive, not {factor!r}.")
        _unit(self).group.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether to sum on the wire and divide afterwards, also where the backend could average."""
        _unit(self).group.sum_only = enable

    # -- the rest of the FSDP2 interface

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_requires_all_reduce", "use set_requires_gradient_sync to skip the whole reduction")

    def set_custom_all_gather(self, comm: object) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_custom_all_gather", "the process group of the mesh decides how bytes move")

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_custom_reduce_scatter", "the process group of the mesh decides how bytes move")

    def set_all_reduce_hook(self, hook: Callable[[Any], None], *, stream: Any = None) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_all_reduce_hook", "use a 2-d mesh for hybrid sharding")

    def set_post_optim_event(self, event: Any) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_post_optim_event", "all-gathers wait for the stream on which the forward runs")

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported(
            "set_reduce_scatter_unused_params",
            "messages have one size on every rank, whatever it used; a parameter without gradient keeps grad None",
        )

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_reduce_scatter_max_input_buffers", "at most two reductions are in flight")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_separate_reduce_scatter_group", "both directions use the process group of the mesh")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_allocate_memory_from_process_group_for_comm", "buffers come from torch's allocator")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_symm_mem_for_comm", "buffers come from torch's allocator")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: all-gathers are always asynchronous here."""

    def _get_fsdp_state(self) -> Any:
        return _unit(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``to_empty`` … act on the sharded parameters; the groups take over what came of them."""
        for unit in _units(self, recurse=True):
            unit.group.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for unit in _units(self, recurse=True):
            unit.group.refresh()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _unsupported("copy.deepcopy of a sharded module", "build a second model, shard it, and load_state_dict into it")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _unsupported(
            "pickling a sharded module", "save its state_dict(), for example with torch.distributed.checkpoint"
        )


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``FSDPModule`` and ``original`` that sharded modules of that class get. One per class."""
    if original not in _classes:
        body = {"__module__": original.__module__, "__doc__": original.__doc__}
        _classes[original] = types.new_class(
            f"FSDP{original.__name__}", (FSDPModule, original), exec_body=lambda namespace: namespace.update(body)
        )
    return _classes[original]


def _unit(module: object) -> Unit:
    assert isinstance(module, nn.Module)
    return unit_of(module)


def _units(module: object, recurse: bool) -> Iterator[Unit]:
    assert isinstance(module, nn.Module)
    if not recurse:
        yield unit_of(module)
        return
    for child in module.modules():
        unit = find_unit(child)
        if unit is not None:
            yield unit


def _prefetch_units(direction: str, modules: Sequence[TorchFSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigurationError(
                f"set_modules_to_{direction}_prefetch takes sharded modules, not {type(module).__name__}: "
                "call fully_shard on it first."
            )
    return [_unit(module) for module in modules]


def _unsupported(what: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{what} is not supported in this version; {instead}.")
