"""The only code that registers hooks on modules and on autograd's graph.

Where a gradient enters a call is seen by hooks on the *nodes* that made its outputs, for an output that is a view also
on the node of its base: hooks on output tensors are lost when a view is changed in place. Where it leaves is seen on
views of the inputs, made just for the call, so that other uses of the same tensors do not count.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.runtime.assemble import iteration_of
from composable_fsdp.runtime.call import Call
from composable_fsdp.runtime.compile import OutsideGraphs, calling_frame, frame_of_call
from composable_fsdp.runtime.containers import map_tensors, tensors_in
from composable_fsdp.runtime.parameter import alias_of, local_part
from composable_fsdp.runtime.tensors import shard_of
from composable_fsdp.runtime.unit import Unit

__all__ = [
    "HookHandles",
    "call_as_forward",
    "hooks_for_clients",
    "install_hooks",
    "is_being_called",
    "wrap_forward_method",
]


class HookHandles(NamedTuple):
    """With which the hooks around a module's forward can be taken off."""

    pre_forward: RemovableHandle
    post_forward: RemovableHandle


class ClientHooks(NamedTuple):
    """Of one module, to be registered by a client, with something around them, in place of ours."""

    pre_forward: Callable[..., Any]
    post_forward: Callable[..., Any]


def install_hooks(unit: Unit) -> dict[nn.Module, HookHandles]:
    """Makes ``unit``'s modules unshard before they compute, reshard after it, and come back in backward."""
    handles = {}
    for module in unit.modules:
        hooks = _ModuleHooks(unit, module)
        handles[module] = HookHandles(
            module.register_forward_pre_hook(OutsideGraphs(hooks.pre_forward), prepend=True, with_kwargs=True),
            module.register_forward_hook(OutsideGraphs(hooks.post_forward), always_call=True),
        )
        module.register_state_dict_pre_hook(hooks.before_state_dict)
        module.register_state_dict_post_hook(_make_copyable)
        module.register_load_state_dict_pre_hook(hooks.before_load_state_dict)
        module.register_load_state_dict_post_hook(hooks.after_load_state_dict)
    return handles


def hooks_for_clients(unit: Unit, module: nn.Module) -> ClientHooks:
    """The hooks around the forward of ``module``, which may be called through functions of others."""
    hooks = _ModuleHooks(unit, module)
    return ClientHooks(OutsideGraphs(hooks.pre_forward_through_others), OutsideGraphs(hooks.post_forward))


def wrap_forward_method(unit: Unit, module: nn.Module, method_name: str) -> None:
    """Gives a method of the module other than ``forward`` the same treatment as ``forward``."""
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigurationError(f"{type(module).__name__} has no method {method_name!r} to register.")

    setattr(module, method_name, _ForwardMethod(unit, module, method))


class _ForwardMethod:
    """``method`` with the parameters in memory. An object, so that in a deep copy it is the method of the copy."""

    def __init__(self, unit: Unit, module: nn.Module, method: Callable[..., Any]) -> None:
        self._unit = unit
        self._module = module
        self._method = method
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_as_forward(self._unit, self._module, self._method, args, kwargs)


def call_as_forward(
    unit: Unit, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``method(*args, **kwargs)`` with the parameters of ``unit`` in memory, as in a call of ``module``."""
    hooks = _ModuleHooks(unit, module)
    hooks.begin(sys._getframe())
    try:
        args, kwargs = hooks.take_inputs(args, kwargs)
        output = method(*args, **kwargs)
    except BaseException:
        hooks.abort()
        raise
    return hooks.finish(output)


def is_being_called(unit: Unit) -> bool:
    """Whether a call of the unit is on the Python stack. Calls left by an interrupt are forgotten here."""
    frames = unit.calls_under_way
    if not frames or frames[-1].thread != threading.get_ident():
        return False
    running: FrameType | None = sys._getframe()
    while running is not None:
        if running is frames[-1].caller:
            return True
        running = running.f_back
    frames.clear()
    return False


class _Input(NamedTuple):
    """A view of an input that needs a gradient, made for one call."""

    view: torch.Tensor
    version: int
    """When it was made: a view that was changed in place since then has another node."""


@dataclass(slots=True)
class _Frame:
    """One forward call under way."""

    handling: BaseException | None
    """The exception that was being handled when the call began; another one at its end is the call's own."""
    caller: FrameType
    """The Python frame that runs the call."""
    is_inner: bool
    """Whether it is part of another call of the same unit, such as ``forward`` called by a registered ``generate``."""
    thread: int = field(default_factory=threading.get_ident)
    inputs: list[_Input] = field(default_factory=list)


class _ModuleHooks:
    """The hooks of one module of a unit. Final. The unit knows its calls under way, innermost last.

    A call inside another call of the same unit only casts: the outer one brings parameters in and out of memory.
    """

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        self._unit = unit
        self._module = module

    # -- forward

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.begin(calling_frame())
        return self.take_inputs(args, kwargs)

    def pre_forward_through_others(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        self.begin(frame_of_call(module))
        return self.take_inputs(args, kwargs)

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        calls = self._unit.calls_under_way
        if not calls or calls[-1].thread != threading.get_ident():
            return None  # refused before it began, as another thread runs the model
        if sys.exc_info()[1] is not calls[-1].handling:
            self.abort()
            return None
        return self.finish(output)

    def begin(self, caller: FrameType) -> None:
        """A call that ``caller`` runs is under way."""
        iteration_of(self._unit).check_thread(self._unit)
        is_inner = is_being_called(self._unit)
        self._unit.calls_under_way.append(_Frame(sys.exc_info()[1], caller, is_inner))

    def take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Brings the parameters into memory, and the inputs to where and in what they compute."""
        unit, frame = self._unit, self._unit.calls_under_way[-1]
        iteration = iteration_of(unit)
        if not frame.is_inner:
            iteration.pre_forward(unit)
        dtype = unit.precision.input_dtype
        device = unit.group.axes.device if unit is iteration.root else None
        watches = torch.is_grad_enabled() and not frame.is_inner
        if dtype is not None or device is not None or watches:
            take = _InputMap(device, dtype, frame.inputs if watches else None)
            args = map_tensors(take, args)
            if kwargs:
                kwargs = map_tensors(take, kwargs)
        return args, kwargs

    def finish(self, output: Any) -> Any:
        """After a forward that returned: reshards, and arranges for the way back."""
        unit, frame = self._unit, self._unit.calls_under_way.pop()
        if unit.precision.output_dtype is not None:
            output = map_tensors(_cast_to(unit.precision.output_dtype), output)
        if frame.is_inner:
            return output
        call = iteration_of(unit).post_forward(unit, self._module)
        return output if call is None else _watch_backward(call, frame.inputs, output)

    def abort(self) -> None:
        """After a forward that raised; while its exception is being handled."""
        if not self._unit.calls_under_way.pop().is_inner:
            iteration_of(self._unit).abort_forward(self._unit, sys.exc_info()[1])

    # -- state dicts: their values are the sharded parameters

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._unit.group.reshard()

    def before_load_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Of full plain tensors, every rank takes its shards."""
        self._unit.group.reshard()
        parameters = {id(p.sharded): p for p in self._unit.group.parameters}
        for name, registered in module.named_parameters(remove_duplicate=False):
            parameter, value = parameters.get(id(registered)), cast(Any, state_dict.get(prefix + name))
            if parameter is not None and _is_whole(value, parameter.sharding.shape):
                state_dict[prefix + name] = shard_of(parameter, value)

    def after_load_state_dict(self, *_: Any) -> None:
        self._unit.deliver_before_changes()
        self._unit.group.refresh()


def _make_copyable(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Has ``copy.deepcopy`` take the values of a state dict, as averages and best checkpoints do.

    The parameters themselves, which ``keep_vars`` gives, stay.
    """
    for name in [name for name in state if name.startswith(prefix)]:
        value = state[name]
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and value.storage_offset():
            state[name] = alias_of(value, local_part(value))


def _is_whole(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether ``value`` is a plain tensor, with values, of a parameter of this shape."""
    return type(value) in (torch.Tensor, nn.Parameter) and tuple(value.shape) == shape and not value.is_meta


class _InputMap:
    """Moves and casts inputs, and notes a view of each that needs a gradient: one, however often it occurs."""

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None, watched: list[_Input] | None) -> None:
        self._device = device
        self._dtype = dtype
        self._watched = watched
        self._mapped: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._mapped.get(id(tensor))
        if known is not None:
            return known
        mapped = tensor
        if self._device is not None and tensor.device != self._device:
            mapped = mapped.to(self._device, non_blocking=True)
        if self._dtype is not None and tensor.is_floating_point():
            mapped = mapped.to(self._dtype)
        if self._watched is not None and mapped.requires_grad:
            mapped = mapped.view_as(mapped) if mapped is tensor else mapped
            self._watched.append(_Input(mapped, mapped._version))
        self._mapped[id(tensor)] = mapped
        return mapped


def _cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _watch_backward(call: Call, inputs: Sequence[_Input], output: Any) -> Any:
    """Hooks the nodes where gradients enter ``call`` and those where they leave it.

    Where an input was changed in place, they leave it in several places, some of them before the module's own backward
    is over: then nothing shows that it is.
    """
    unit = call.unit
    for view, version in inputs:
        if view._version != version:
            inputs = ()
            break
    nodes = _nodes_of(output)
    if None in nodes:
        output = map_tensors(_off_the_leaf, output)
        nodes = _nodes_of(output)
    if not nodes and not inputs:
        return output

    def entered(_: Any) -> None:
        pre_backward = unit.client_pre_backward or iteration_of(unit).pre_backward
        pre_backward(call)

    def left(*_: Any) -> None:
        iteration_of(unit).post_backward(call)

    for node in nodes:
        node.register_prehook(entered)
    if inputs:
        call.await_inputs()
        node = inputs[0].view.grad_fn
        if len(inputs) == 1 and node is not None:
            node.register_hook(left)  # on the tensor it would cost twice as much
        else:
            register_multi_grad_hook([each.view for each in inputs], left)
    else:
        call.round.ends_unseen = True
    return output


def _nodes_of(output: Any) -> set[Any]:
    """The nodes that made the tensors in ``output`` and the bases of views; ``None`` if one is a leaf."""
    nodes: set[Any] = set()
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            nodes.add(tensor.grad_fn)
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                nodes.add(base.grad_fn)
    return nodes


def _off_the_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a node of its own in place of a leaf: hooks on a leaf would outlive the call."""
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.grad_fn is None else tensor
