"""The only code that registers hooks on modules and on autograd's graph.

Where a gradient enters a call is seen by hooks on the *nodes* that made its outputs, for an output that is a view also
on the node of its base: hooks on output tensors are lost when a view is changed in place. Where it leaves is seen on
views of the inputs, made just for the call, so that other uses of the same tensors do not count.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import FrameType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from composable_fsdp._runtime.compile import OutsideGraphs, calling_frame, frame_of_call
from composable_fsdp._runtime.groups.group_tensors import shard_of
from composable_fsdp._runtime.groups.state import FSDPState, ModuleReference
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp._runtime.params.sharded_param import alias_of, local_part
from composable_fsdp._runtime.pytree import map_tensors, tensors_in
from composable_fsdp._runtime.root.forward_call import Call
from composable_fsdp._runtime.root.iteration import Iteration
from composable_fsdp.errors import ConfigurationError

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


def install_hooks(state: FSDPState) -> dict[nn.Module, HookHandles]:
    """Makes ``state``'s modules unshard before they compute, reshard after it, and come back in backward."""
    handles = {}
    for module in state.modules:
        hooks = _ModuleHooks(state)
        handles[module] = HookHandles(
            module.register_forward_pre_hook(OutsideGraphs(hooks.pre_forward), prepend=True, with_kwargs=True),
            module.register_forward_hook(OutsideGraphs(hooks.post_forward), always_call=True),
        )
        module.register_state_dict_pre_hook(hooks.before_state_dict)
        module.register_state_dict_post_hook(_make_copyable)
        module.register_load_state_dict_pre_hook(hooks.before_load_state_dict)
        module.register_load_state_dict_post_hook(hooks.after_load_state_dict)
    return handles


def hooks_for_clients(state: FSDPState) -> ClientHooks:
    """The hooks around the forward of a module of ``state``, which may be called through functions of others."""
    hooks = _ModuleHooks(state)
    return ClientHooks(OutsideGraphs(hooks.pre_forward_through_others), OutsideGraphs(hooks.post_forward))


def wrap_forward_method(state: FSDPState, module: nn.Module, method_name: str) -> None:
    """Gives a method of the module other than ``forward`` the same treatment as ``forward``."""
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigurationError(f"{type(module).__name__} has no method {method_name!r} to register.")

    setattr(module, method_name, _ForwardMethod(state, module, method))


class _ForwardMethod:
    """``method`` with the parameters in memory. An object, so that in a deep copy it is the method of the copy.

    ``module`` owns it, and it does not own ``module``: of a bound method it keeps the function.
    """

    def __init__(self, state: FSDPState, module: nn.Module, method: Callable[..., Any]) -> None:
        self._state = state
        self._module = ModuleReference(module)
        self._is_bound = getattr(method, "__self__", None) is module
        self._method = cast(MethodType, method).__func__ if self._is_bound else method
        functools.update_wrapper(self, self._method)
        with suppress(TypeError, ValueError):  # some builtins have no signature
            vars(self)["__signature__"] = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        method = MethodType(self._method, module) if self._is_bound else self._method
        return call_as_forward(self._state, module, method, args, kwargs)


def call_as_forward(
    state: FSDPState, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``method(*args, **kwargs)`` with the parameters of ``state`` in memory, as in a call of ``module``."""
    hooks = _ModuleHooks(state)
    hooks.begin(sys._getframe())
    try:
        args, kwargs = hooks.take_inputs(args, kwargs)
        output = method(*args, **kwargs)
    except BaseException:
        hooks.abort()
        raise
    return hooks.finish(module, output)


def is_being_called(state: FSDPState) -> bool:
    """Whether a call of the unit is on the Python stack. Calls left by an interrupt are forgotten here."""
    frames = state.calls_under_way
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
    """A view of an input that needs a gradient, made for one call.

    A hook on its node costs half of what one on the tensor does.
    """

    view: Any
    version: int
    """When it was made: a view that was changed in place since then has another node."""


@dataclass(slots=True)
class _Frame:
    """One forward call under way."""

    handling: BaseException | None
    """The exception that was being handled when the call began; another one at its end is the call's own."""
    caller: FrameType
    """The Python frame that runs the call."""
    iteration: Iteration
    is_inner: bool
    """Whether it is part of another call of the same unit, such as ``forward`` called by a registered ``generate``."""
    thread: int = field(default_factory=threading.get_ident)
    inputs: list[_Input] = field(default_factory=list)


class _ModuleHooks:
    """The hooks of the modules of a unit. Final. The unit knows its calls under way, innermost last.

    A call inside another call of the same unit only casts: the outer one brings parameters in and out of memory.
    """

    def __init__(self, state: FSDPState) -> None:
        self._state = state

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
        calls = self._state.calls_under_way
        if not calls or calls[-1].thread != threading.get_ident():
            return None  # refused before it began, as another thread runs the model
        if sys.exc_info()[1] is not calls[-1].handling:
            self.abort()
            return None
        return self.finish(module, output)

    def begin(self, caller: FrameType) -> None:
        """A call that ``caller`` runs is under way."""
        state = self._state
        iteration = iteration_of(state)
        iteration.check_thread(state)
        calls = state.calls_under_way
        is_inner = bool(calls) and is_being_called(state)
        calls.append(_Frame(sys.exc_info()[1], caller, iteration, is_inner))

    def take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Brings the parameters into memory, and the inputs to where and in what they compute."""
        state, frame = self._state, self._state.calls_under_way[-1]
        iteration = frame.iteration
        if not frame.is_inner:
            iteration.pre_forward(state)
        dtype = state.precision.input_dtype
        device = state.group.axes.device if state is iteration.root else None
        watchdogs = torch.is_grad_enabled() and not frame.is_inner
        if dtype is not None or device is not None or watchdogs:
            take = _InputMap(device, dtype, frame.inputs if watchdogs else None)
            args = map_tensors(take, args)
            if kwargs:
                kwargs = map_tensors(take, kwargs)
        return args, kwargs

    def finish(self, module: nn.Module, output: Any) -> Any:
        """After a forward that returned: reshards, and arranges for the way back."""
        state, frame = self._state, self._state.calls_under_way.pop()
        if state.precision.output_dtype is not None:
            output = map_tensors(_cast_to(state.precision.output_dtype), output)
        if frame.is_inner:
            return output
        call = frame.iteration.post_forward(state, module)
        return output if call is None else _watch_backward(call, frame.iteration, frame.inputs, output)

    def abort(self) -> None:
        """After a forward that raised; while its exception is being handled."""
        frame = self._state.calls_under_way.pop()
        if not frame.is_inner:
            frame.iteration.abort_forward(self._state, sys.exc_info()[1])

    # -- state dicts: their values are the sharded parameters

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._state.group.reshard()
        self._state.group.check_data()

    def before_load_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Of full plain tensors, every rank takes its shards."""
        self._state.group.reshard()
        parameters = {id(p.sharded): p for p in self._state.group.parameters}
        for name, registered in module.named_parameters(remove_duplicate=False):
            parameter, value = parameters.get(id(registered)), cast(Any, state_dict.get(prefix + name))
            if parameter is not None and _is_whole(value, parameter.sharding.shape):
                state_dict[prefix + name] = shard_of(parameter, value)

    def after_load_state_dict(self, *_: Any) -> None:
        self._state.deliver_before_changes()
        self._state.group.refresh()


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


def _watch_backward(call: Call, iteration: Iteration, inputs: Sequence[_Input], output: Any) -> Any:
    """Hooks the nodes where gradients enter ``call`` and those where they leave it.

    Where an input was changed in place, gradients leave it in several places, some of them before the module's own
    backward is over: then nothing shows that it is. The same holds for a detached input. The hooks own the unit and
    ``iteration``, so that backward also runs after the model was dropped.
    """
    state = call.state
    for view, version in inputs:
        if view._version != version or view.grad_fn is None:
            inputs = ()
            break
    nodes, bases = _nodes_of(output)
    if None in nodes:
        output = map_tensors(_off_the_leaf, output)
        nodes, bases = _nodes_of(output)
    if not nodes and not inputs:
        return output

    def entered(_: Any) -> None:
        pre_backward = state.client_pre_backward or (state.iteration or iteration).pre_backward
        pre_backward(call)

    def left(*_: Any) -> None:
        (state.iteration or iteration).post_backward(call)

    if not inputs:
        call.round.ends_unseen = True
    elif len(inputs) == 1:
        call.await_inputs()
        inputs[0].view.grad_fn.register_hook(left)
    else:
        call.await_inputs()
        exits = [view.grad_fn for view, _ in inputs]
        departures = _Departures(len(exits), left)
        for node in exits:
            node.register_hook(departures.leave)
        for node in nodes.difference(exits, bases):
            node.register_prehook(departures.counts(exits))
    for node in nodes:
        node.register_prehook(entered)
    for node in bases - nodes if bases else ():
        node.register_prehook(entered)
    return output


_NO_NODES: frozenset[Any] = frozenset()


class _Departures:
    """Calls ``last`` when gradients have left a call through all of its inputs. Final.

    ``torch.autograd.graph.register_multi_grad_hook`` does this too. But its hooks own the nodes that own the hooks, so
    that only Python's collector can free the graph. Here the inputs' nodes are owned only by hooks of nodes that come
    after them in the graph, and so own them anyway.

    Args:
        number: of the inputs.
        last: the hook for the last one.
    """

    __slots__ = ("_awaited", "_gone", "_last", "_number", "_run")

    def __init__(self, number: int, last: Callable[..., None]) -> None:
        self._number = number
        self._last = last
        self._run = -1
        """Autograd's run in which gradients enter and leave now."""
        self._awaited = 0
        self._gone = count(1)

    def counts(self, exits: Sequence[Any]) -> Callable[[Any], None]:
        """The hook for where gradients enter: finds out which of ``exits``, the inputs' nodes, this run comes to."""

        def entered(_: Any) -> None:
            self._begin()
            self._awaited = sum(map(torch._C._will_engine_execute_node, exits))

        return entered

    def leave(self, *_: Any) -> None:
        """The hook for each of the inputs."""
        self._begin()
        if next(self._gone) == self._awaited:
            self._last()

    def _begin(self) -> None:
        run = torch._C._current_graph_task_id()
        if run != self._run:
            self._run, self._awaited, self._gone = run, self._number, count(1)


def _nodes_of(output: Any) -> tuple[set[Any], AbstractSet[Any]]:
    """The nodes that made the tensors in ``output``, among them ``None`` for a leaf; and those of the bases of views,
    which may lie before the call, where it returns a view of an input.
    """
    nodes: set[Any] = set()
    bases: AbstractSet[Any] = _NO_NODES
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            nodes.add(tensor.grad_fn)
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                bases = bases | {base.grad_fn}
    return nodes, bases


def _off_the_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a node of its own in place of a leaf: hooks on a leaf would outlive the call."""
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.grad_fn is None else tensor
