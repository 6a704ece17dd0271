"""The hooks of modules and of autograd, and the root that they call, made in the first forward."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from types import FrameType, FunctionType
from typing import Any, TypeAlias, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import PyTree

from composable_fsdp._core.group import AutogradTask
from composable_fsdp._core.memory import CommStreams
from composable_fsdp._core.params import (
    local_part,
    note_optimizer_step,
    plain_tensors,
)
from composable_fsdp._core.pytree import CallInputs, InputView, cycle_error, map_tensors, tensors_in
from composable_fsdp._core.root import Root, StreamLauncher
from composable_fsdp._core.seams import (
    HOOK_FRAMES,
    HOOK_WRAPPERS,
    OBSERVERS,
    HookHandles,
    in_transform,
    outside_callers_context,
    runs_outside,
)
from composable_fsdp._core.state import (
    ROOT_ATTRIBUTE,
    ForwardCall,
    FSDPState,
    GlobalHooks,
    find_state,
    state_of,
    state_of_parameter,
)
from composable_fsdp.errors import ConfigurationError

Arguments: TypeAlias = tuple[PyTree, ...]
Keywords: TypeAlias = dict[str, PyTree]


def calling_frame(depth: int = 2) -> FrameType:
    """Return the frame that called the caller's hook, skipping the frames of wrappers.

    ``depth`` is 2 if the hook calls this itself, and one more for each function between.
    """
    frame = sys._getframe(depth)
    while frame.f_code in HOOK_FRAMES and frame.f_back is not None:
        frame = frame.f_back
    return frame


def wrapped_hook(hook: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return ``hook`` in all of :data:`HOOK_WRAPPERS`."""
    for wrap in HOOK_WRAPPERS:
        hook = wrap(hook)
    return hook


ROOT_NAME = "root"

_roots: tuple[ref[Root], ...] = ()
"""All roots, oldest first: in the same order on every rank. Replaced, never changed."""
_roots_lock = threading.Lock()


def _register(root: Root) -> None:
    global _roots
    with _roots_lock:
        _roots = (*(known for known in _roots if known() is not None), ref(root))


def root_of(state: FSDPState) -> Root:
    """Return the root of ``state``. If there is none, make one whose outermost state is ``state``.

    Raises:
        LifecycleError: no module of the root may run now.
    """
    root: Root | None = state.root
    if root is None:
        return assemble(state)
    root.check_available()
    return root


@runs_outside
def assemble(root_state: FSDPState) -> Root:
    """Build the root of ``root_state`` and name the states below it by their qualified names.

    A module that ran on its own before its parent was a root; its states now belong to the new root.
    """
    states = states_by_name(root_state.modules)
    for observer in OBSERVERS:
        observer.before_assembly(root_state, states)
    formers = dict.fromkeys(root_of(state) for state in states.values() if state.root is not None)  # may refuse
    # The root of all states below, in the order of modules.
    launcher = StreamLauncher(CommStreams(root_state.group.axes.device))
    root = Root(root_state, states, launcher, AutogradTask(), OBSERVERS)
    _register(root)
    # Roots that are now inside of it end, and leave their settings.
    for former in formers:
        former.drain()
        root.finalization.is_manual |= former.finalization.is_manual
        root.finalization.is_last_backward &= former.finalization.is_last_backward
        root.post_optimizer_event = former.post_optimizer_event or root.post_optimizer_event
        for module in former.root_state.modules:
            vars(module).pop(ROOT_ATTRIBUTE, None)
    for module in root_state.modules:
        vars(module)[ROOT_ATTRIBUTE] = root
    # All states have this root and their qualified names from now on.
    for name, state in states.items():
        state.group.rename(name)
        state.group.follow_patches()
        state.root = root
    return root


def states_by_name(tops: Sequence[nn.Module]) -> dict[str, FSDPState]:
    """Return the states below ``tops`` by name, in module order. A state of several modules has all their names.

    A state without a name is the root, even if a module is called "root".
    """
    places: dict[FSDPState, list[str]] = {}
    for index, top in enumerate(tops):
        prefix = f"{index}." if len(tops) > 1 else ""
        for name, module in top.named_modules():
            state = find_state(module)
            if state is not None and module in state.modules:
                places.setdefault(state, []).append(f"{prefix}{name}" if name else "")
    named = {", ".join(filter(None, names)): state for state, names in places.items()}
    root = ROOT_NAME if ROOT_NAME not in named else f"({ROOT_NAME})"
    return {name or root: state for name, state in named.items()}


def states_of(model: nn.Module) -> list[tuple[str, FSDPState]]:
    """Return all FSDP states in the order of modules, each once, with its name in ``model``.

    Raises:
        ConfigurationError: there is none.
    """
    states = states_by_name([model])
    if not states:
        raise ConfigurationError(f"no module of this {type(model).__name__} is sharded: apply fully_shard first.")
    for state in states.values():  # outermost first, so that it becomes the root of those within it
        root_of(state)
    return list(states.items())


def _install_optimizer_hooks() -> Callable[[], None]:
    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with optimizer_hooks, outside_callers_context():
            for observer in OBSERVERS:
                observer.before_step(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with optimizer_hooks, outside_callers_context():
            sharded = sharded_parameters(optimizer)
            note_optimizer_step([p for p, _ in sharded])
            for root in roots_stepped_by(optimizer, sharded):
                root.planner.steps.note()
            for observer in reversed(OBSERVERS):
                observer.after_step(optimizer)

    handles = (
        register_optimizer_step_pre_hook(wrapped_hook(before_step)),
        register_optimizer_step_post_hook(wrapped_hook(after_step)),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


optimizer_hooks = GlobalHooks(_install_optimizer_hooks)
"""The hooks that tell observers of steps, and count them."""


def roots_stepped_by(
    optimizer: torch.optim.Optimizer, sharded: Sequence[tuple[torch.Tensor, FSDPState]]
) -> Iterable[Root]:
    """Return the roots whose parameters ``optimizer`` holds, ``sharded``, or tensors in the memory of their shards.

    A model of another thread, or one that only some ranks train, must not make kept parameters be gathered again.
    """
    found = [root_of(state) for state in dict.fromkeys(state for _, state in sharded) if state.root is not None]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(sharded) < len(parameters):
        plain = (tensor for p in parameters for tensor in plain_tensors(local_part(p)))
        storages = {tensor.untyped_storage()._cdata for tensor in plain if tensor.layout is torch.strided}
        found += [root for known in _roots if (root := known()) and root.has_shards_in(storages)]
    return dict.fromkeys(found)


def sharded_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, FSDPState]]:
    """Return the sharded parameters that ``optimizer`` holds, with their states."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [(p, state) for p in parameters if (state := state_of_parameter(p)) is not None]


def install_hooks(state: FSDPState) -> dict[nn.Module, HookHandles]:
    """Register hooks so that the modules of ``state`` unshard before they compute and reshard afterwards."""
    handles = {}
    for module in state.modules:
        hooks = ModuleHooks(state)
        handles[module] = HookHandles(
            module.register_forward_pre_hook(wrapped_hook(hooks.pre_forward), prepend=True, with_kwargs=True),
            module.register_forward_hook(wrapped_hook(hooks.post_forward), always_call=True),
        )
    return handles


def hooked_forward(original: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wrap ``original`` to unshard parameters also when ``forward`` is called directly, without ``__call__``."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        state = state_of(self)
        calls = state.calls_under_way
        # Usually the frame that calls this has called our hook. Else look for a call further up.
        if (calls and calls[-1].caller is sys._getframe(1)) or is_being_called(state):
            return original(self, *args, **kwargs)
        return call_as_forward(state, self, functools.partial(original, self), args, kwargs)

    return forward


HOOKED_FORWARD = cast(FunctionType, hooked_forward(print)).__code__
"""The code of all functions that :func:`hooked_forward` returns."""


def call_as_forward(
    state: FSDPState, module: nn.Module, method: Callable[..., PyTree], args: Arguments, kwargs: Keywords
) -> PyTree:
    """Return ``method(*args, **kwargs)``, called with unsharded parameters of ``state``, as in a call of ``module``."""
    call = begin_call(state, sys._getframe())
    try:
        if not call.is_inner:
            call.root.pre_forward(call)
        args, kwargs = take_inputs(call, args, kwargs)
        output = method(*args, **kwargs)
    except Exception:  # as torch's calls; what an interrupt leaves, the next call drops
        abort_call(state)
        raise
    return finish_call(state, module, output)


def is_being_called(state: FSDPState) -> bool:
    """Return True if a call of this state is on the Python stack. Drop calls that an interrupt left behind."""
    calls = state.calls_under_way
    if not calls or calls[-1].thread != threading.get_ident():
        return False
    caller = calls[-1].caller
    running: FrameType | None = sys._getframe(1)
    while running is not None:
        if running is caller:
            return True
        running = running.f_back
    while calls:
        calls.pop().end()
    return False


def begin_call(state: FSDPState, caller: FrameType) -> ForwardCall:
    """Begin a call of a module of ``state`` that the frame ``caller`` runs."""
    root: Root = state._root() or assemble(state)
    root.check_thread(state)
    for owner in state.owner_states:
        other: Root = root_of(owner)  # made here if there is none: it reduces their gradients
        if other is not root and not owner.is_in_use:  # those of this root are asked when its forward begins
            other.free_if_stale(owner)
    calls = state.calls_under_way
    is_inner = bool(calls) and is_being_called(state)
    call = ForwardCall(state, root, caller, sys.exc_info()[1], is_inner)
    calls.append(call)
    return call


def take_inputs(call: ForwardCall, args: Arguments, kwargs: Keywords) -> tuple[PyTree, PyTree]:
    """Move and cast the inputs of ``call``, whose parameters are unsharded."""
    state, watched = call.state, False
    # Tell observers that the module computes next.
    if not call.is_inner:
        for observe in call.root.observers.enter_call:
            observe(call.root, call)
        if state.group.registration.shows_tensors_of_user:
            for observe in call.root.observers.enter_with_others:
                observe(call.root, call)
        watched = torch.is_grad_enabled()
    # What happens to inputs: moved by the root, cast by each, and watched for the end of backward.
    precision = state.options.precision
    dtype = precision.param_dtype if precision.cast_forward_inputs else None  # input_dtype, without a call
    device = state.group.axes.device if state is call.root.root_state else None
    watches_all = watched and (in_transform() or dual_numbers._current_level >= 0)
    # Nothing at all, in evaluation without mixed precision below the root.
    if watched or dtype is not None or device is not None or precision.output_dtype is not None:
        take = call.inputs = CallInputs(device, dtype, watched=watched, watches_all=watches_all)
        try:
            if len(args) == 1 and isinstance(args[0], torch.Tensor):
                args = (take(args[0]),)
            else:
                args = map_tensors(take, args, take.container)
            if kwargs:
                kwargs = {name: map_tensors(take, value, take.container) for name, value in kwargs.items()}
        except RecursionError as error:
            raise cycle_error(f"an input of {call.name!r}") from error
    return args, kwargs


def finish_call(state: FSDPState, module: nn.Module, output: PyTree) -> PyTree:
    """End a call that returned: reshard, and register hooks for backward."""
    call = state.calls_under_way.pop()
    try:
        # Give containers back to the caller, and cast the output.
        inputs, dtype = call.end(), state.options.precision.output_dtype
        if inputs.containers:
            output = inputs.map_output(_cast_to(dtype), output)
        elif dtype is not None:
            output = map_tensors(_cast_to(dtype), output)
        # Reshard, then watch for backward if one may come.
        if call.run.remaining:  # other modules of the group may still come in this run
            call.run.remaining.discard(id(module))
        if call.is_inner or not call.root.post_forward(call):
            return output
        return _watch_backward(call, inputs, output)
    except Exception as error:
        if not call.is_inner:
            call.root.abort_forward(call, error)
        if isinstance(error, RecursionError):
            raise cycle_error(f"the output of {call.name!r}") from error
        raise


def abort_call(state: FSDPState) -> None:
    """End a call that raised, while its exception is being handled."""
    call, error = state.calls_under_way.pop(), sys.exc_info()[1]
    call.end()
    if not call.is_inner:
        call.root.abort_forward(call, error)


class ModuleHooks:
    """The hooks of the modules of one FSDP state, which keeps the stack of open calls.

    A call inside another call of the same state only casts: the outer one unshards and reshards.
    """

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    def pre_forward(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[PyTree, PyTree]:
        call = begin_call(self._state, calling_frame())
        if not call.is_inner:
            call.root.pre_forward(call)
        return take_inputs(call, args, kwargs)

    def post_forward(self, module: nn.Module, args: Arguments, output: PyTree) -> PyTree:
        calls = self._state.calls_under_way
        if not calls or calls[-1].thread != threading.get_ident():
            return None  # begin_call() raised, since another thread runs the model
        if sys.exc_info()[1] is not calls[-1].handled_exception:
            abort_call(self._state)
            return None
        return finish_call(self._state, module, output)


def _cast_to(dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _watch_backward(call: ForwardCall, inputs: CallInputs, output: PyTree) -> PyTree:
    """Register hooks on the nodes where gradients enter ``call`` and leave it, and return the output to use.

    Gradients also enter through what the module wrote into tensors and containers of the caller. If an input was
    changed in place, its gradient is ready before the module's backward is done. Then, and for inputs without
    gradients, no hook shows the end. In a transform none does either: the backwards of its levels end apart. The hooks
    own the call, and it owns the FSDP state and the root, so that backward works after the model was dropped.
    """
    # One tensor in and one out, as most modules have: the rest of this function would take twice as long.
    views: Sequence[InputView] = inputs.views
    if len(views) == len(inputs.mapped) == 1 and isinstance(output, torch.Tensor) and not inputs.watches_all:
        (view, version), node = views[0], output.grad_fn
        if node is not None and output._base is None and view._version == version and not inputs.containers:
            call.await_inputs()
            cast(Node, view.grad_fn).register_hook(call.on_last_input_gradient)
            node.register_prehook(call.on_output_gradient)
            return output
    exits = _exits(call, inputs)
    # Each input has a view that was not changed in place: the module has written into none of them.
    output, entries, bases = _entries(inputs, output, reads_written=len(inputs.mapped) != len(exits))
    if not entries and not exits:
        return output
    # The end of backward: the only input, the last of several, or none that a hook could see.
    if not exits:
        call.end_without_hook()
    elif len(exits) == 1:
        call.await_inputs()
        exits[0].register_hook(call.on_last_input_gradient)
    else:
        call.await_inputs()
        counter = _InputGradientCounter(len(exits), call)
        for node in exits:
            node.register_hook(counter.on_input)
        # A base may be older than the call: its hook could run in a backward that never enters the call.
        for node in filter(None, entries.difference(exits, bases)):
            node.register_prehook(counter.expecting(exits))
    # The beginning: whichever output comes first.
    for node in filter(None, entries | bases if bases else entries):
        node.register_prehook(call.on_output_gradient)
    return output


def _exits(call: ForwardCall, inputs: CallInputs) -> list[Node]:
    """Return the nodes of all inputs of ``call``, at which backward leaves it; none if hooks on them show no end."""
    views: Sequence[InputView] = inputs.views
    if not inputs.watches_all:
        nodes = [node for view, version in views if view._version == version and (node := view.grad_fn) is not None]
        return nodes if len(nodes) == len(views) else []
    # In a transform, a later backward may enter by the gradients of any level.
    for layer in (layer for view, _ in views for layer in layers_of(view)):
        if layer.grad_fn is not None:
            layer.grad_fn.register_hook(functools.partial(_enter_by_gradients, call))
    return []


def _entries(
    inputs: CallInputs, output: PyTree, *, reads_written: bool
) -> tuple[PyTree, set[Node | None], AbstractSet[Node | None]]:
    """Return the output to use, the nodes at which backward enters the call, and those of the bases of views.

    Leaves get views, because hooks on leaves stay. Tensors of the caller that the module has written are outputs too.
    """
    if inputs.containers:
        output = inputs.map_output(_with_grad_fn, output, and_written=True)
        nodes, bases = _nodes_of(inputs.outputs(output), in_transform=inputs.watches_all)
    else:
        nodes, bases = _nodes_of(output, in_transform=inputs.watches_all)
        if None in nodes:
            output = map_tensors(_with_grad_fn, output)
            nodes, bases = _nodes_of(output, in_transform=inputs.watches_all)
    if reads_written and (written := inputs.written()):
        more, bases_of_more = _nodes_of(written, in_transform=inputs.watches_all)
        nodes, bases = nodes | more, bases | bases_of_more
    return output, nodes, bases


def _enter_by_gradients(call: ForwardCall, gradients: Sequence[torch.Tensor | None], _: object) -> None:
    """Let a later backward enter ``call`` by ``gradients`` of its inputs, in all levels; a hook for input nodes."""
    call.enter_by([layer for gradient in gradients if gradient is not None for layer in layers_of(gradient)])


_NO_NODES: frozenset[Node | None] = frozenset()


class _InputGradientCounter:
    """Calls ``call.on_last_input_gradient`` when the gradients of all inputs of ``call`` are ready.

    ``torch.autograd.graph.register_multi_grad_hook`` does this too, but its hooks own the nodes that own the hooks, and
    only Python's garbage collector can free such a graph. Here only hooks of later nodes, which own the inputs' nodes
    anyway, have references to these.

    Args:
        number: the number of inputs.
        call: the call.
    """

    __slots__ = ("_awaited", "_call", "_counter", "_number", "_run")

    def __init__(self, number: int, call: ForwardCall) -> None:
        self._number = number
        self._call = call
        self._run = -1
        """The autograd run that ``_awaited`` and ``_counter`` belong to."""
        self._awaited = 0
        self._counter = count(1)

    def expecting(self, input_nodes: Sequence[Node]) -> Callable[[object], None]:
        """Return the hook for output nodes: it counts the ``input_nodes`` that this autograd run will execute."""

        def on_output_gradient(_: object) -> None:
            self._begin()
            self._awaited = sum(map(torch._C._will_engine_execute_node, input_nodes))

        return on_output_gradient

    def on_input(self, gradients: Sequence[torch.Tensor | None], _: object) -> None:
        """Count one input; the hook for input nodes."""
        self._begin()
        if next(self._counter) == self._awaited:
            self._call.on_last_input_gradient(gradients)
        elif torch.is_grad_enabled():
            self._call.enter_by(gradients)

    def _begin(self) -> None:
        run = torch._C._current_graph_task_id()
        if run != self._run:
            self._run, self._awaited, self._counter = run, self._number, count(1)


def _nodes_of(output: PyTree, *, in_transform: bool) -> tuple[set[Node | None], AbstractSet[Node | None]]:
    """Return the nodes of the tensors in ``output``, with ``None`` for leaves, and the nodes of the bases of views.

    The node of a base may be older than the call, if the call returns a view of an input.
    """
    nodes: set[Node | None] = set()
    bases: AbstractSet[Node | None] = _NO_NODES
    tensors: Sequence[torch.Tensor] = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
    if in_transform:
        tensors = [layer for tensor in tensors for layer in layers_of(tensor)]
    for tensor in tensors:
        if tensor.requires_grad:
            nodes.add(tensor.grad_fn)
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                bases = bases | {base.grad_fn}
    return nodes, bases


def _with_grad_fn(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a leaf that needs a gradient, else ``tensor``. Hooks on the leaf would outlive the call."""
    is_leaf = any(layer.requires_grad and layer.grad_fn is None for layer in layers_of(tensor))
    return tensor.view_as(tensor) if is_leaf else tensor


# -- Transforms of torch.func, and forward-mode derivatives

_functorch: Any = torch._C._functorch
dual_numbers: Any = forward_ad
"""The module with the level of dual numbers, ``_current_level``, which is -1 outside of one."""


def layers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor``, its tangents, and the tensors that any of them wraps, of all levels."""
    return [tensor, *_inside(tensor)]


def _inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    # Tangents of forward-mode can be read at this level only.
    top = _functorch.peek_interpreter_stack()
    if forward_ad._current_level >= 0 and (top is None or top.key() == _functorch.TransformType.Jvp):
        tangent = forward_ad.unpack_dual(tensor).tangent
        if tangent is not None:
            found += layers_of(tangent)
    # A plain tensor wraps nothing.
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return found
    if top is None or top.level() < _functorch.maybe_get_level(tensor):  # its level has ended, as for a vjp function
        return found + layers_of(_functorch.get_unwrapped(tensor))
    level = top.level()
    left = _functorch.pop_dynamic_layer_stack()  # tangents of the level outside can only be read there
    try:
        is_of_level = _functorch.maybe_get_level(tensor) == level
        return found + (layers_of(_functorch.get_unwrapped(tensor)) if is_of_level else _inside(tensor))
    finally:
        _functorch.push_dynamic_layer_stack(left)
