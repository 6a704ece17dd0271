"""Views of FSDP states and parameters with the private names of torch's FSDP2 that libraries use.

Pipelining ends gradient accumulation itself, and the memory tracker wraps our hooks. Both find a module's state with
torch's ``fully_shard.state(module)`` or ``module._get_fsdp_state()``; verl and TransformerEngine use torch's
``_get_module_fsdp_state(module)`` too. These functions return a view that reads everything from the FSDP state and
stores only the handles of hooks that clients replace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState
from torch.utils.hooks import RemovableHandle

from composable_fsdp._api.torch_types import find_state, register_state, set_torch_state
from composable_fsdp._core.group_plan import Pass
from composable_fsdp._core.hooks import ModuleHooks, begin_call, calling_frame, root_of, take_inputs, wrapped_hook
from composable_fsdp._core.memory import CommStreams
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.seams import HookHandles, Observer
from composable_fsdp._core.state import ForwardCall, FSDPState, ModuleReference
from composable_fsdp.errors import MissingNameError, UnsupportedError
from composable_fsdp.policies import Reshard, ReshardKind

_OF_ROOT = (
    "one fully_shard for a whole model: torch's own reads this name where a module around ours is sharded by it; "
    "composable_fsdp.interop.patch_torch(), called before, makes its callers use ours"
)


def _refuse(view: object, name: str, problem: str = "does not exist") -> Any:
    remedy = (
        _OF_ROOT if name == "_is_root" else "the methods of the module: the table in docs/upstream.md has each name"
    )
    raise MissingNameError(f"{name} of torch's FSDP2 {problem} here. Use {remedy}.")


def _set_known(view: object, name: str, value: object) -> None:
    """Set an attribute of a view, but none that only torch's objects have: it would have no effect."""
    known = getattr(type(view), name, None)
    if known is None:
        _refuse(view, name)
    if isinstance(known, property) and known.fset is None:
        _refuse(view, name, "cannot be set")
    object.__setattr__(view, name, value)


def _replaceable(name: str) -> Any:
    """Return a property of a view: its method ``_name``, or the function that a client set in its place."""

    def is_of_first(view: ClientState) -> bool:
        return view._reference() is view._state.modules[0]

    def read(view: ClientState) -> Any:
        return (is_of_first(view) and getattr(view._state.backward_wrappers, name)) or getattr(view, f"_{name}")

    def replace(view: ClientState, function: Callable[..., None]) -> None:
        if is_of_first(view):
            view._state.backward_wrappers = view._state.backward_wrappers._replace(**{name: function})

    return property(read, replace)


def _pre_forward_through_others(
    state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Do the work of the pre-forward hook, called by a function of a client."""
    call = begin_call(state, _frame_of_call(module))
    if not call.is_inner:
        call.root.pre_forward(call)
    return take_inputs(call, args, kwargs)


def _frame_of_call(module: nn.Module) -> FrameType:
    """Return the frame that runs the call of ``module`` to which the current hook belongs.

    Other functions may be in between. If ``module`` is not being called, e.g. because the hook wraps a method, return
    the frame that called the hook.
    """
    caller = frame = calling_frame(3)
    while frame.f_back is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            return frame
        frame = frame.f_back
    return caller


class ClientState:
    """View of the FSDP state of ``module`` with the attributes of torch's ``FSDPState`` and ``FSDPParamGroup``.

    It passes ``isinstance`` for torch's state without being a subclass, so it inherits no code from torch.

    A function set as ``pre_backward`` or ``post_backward`` runs in place of the original and calls it with the
    arguments it got. For a list of modules, setting them has an effect only through the first module: a client that
    visits every module would otherwise have its function called once per module.
    """

    __slots__ = ("__weakref__", "_post_forward_handle", "_pre_forward_hook_handle", "_reference", "_state")

    def __init__(self, state: FSDPState, module: nn.Module, handles: HookHandles | None) -> None:
        self._state = state
        self._reference = ModuleReference(module)
        if handles is not None:  # None for a module that is inside another one of the list
            self._pre_forward_hook_handle = handles.pre_forward
            self._post_forward_handle = handles.post_forward

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return TorchFSDPState

    __getattr__ = _refuse
    __setattr__ = _set_known

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Give a deep copy its attributes, and register it."""
        for name, value in state[1].items():
            setattr(self, name, value)
        register_state(self._reference(), self)

    def _set_auto_reshard(self, auto: bool) -> None:
        """Accept ``False``, which clients set before ``post_forward_mesh_info``, without effect: that is enough."""
        if auto:
            raise UnsupportedError("_auto_reshard_after_forward cannot be set here; use set_reshard_after_forward().")

    _auto_reshard_after_forward = property(None, _set_auto_reshard)

    _state_ctx = property(lambda view: view)
    """The object shared by all states of a root. Each view can serve as it."""

    def _share(self, streams: CommStreams) -> None:
        root_of(self._state).streams = streams

    _comm_ctx = comm_ctx = property(lambda view: root_of(view._state).streams, _share)
    """One object for each communication context: pipelines compare its identity. Torch's ``share_comm_ctx`` sets it."""

    manual_backward_finalization = property(
        lambda view: view._state.root is not None and view._state.root.finalization.is_manual
    )

    @property
    def all_states(self) -> list[Any]:
        """The views of all FSDP states of the root, in the order of its modules."""
        states = root_of(self._state).states.values()
        return [find_state(module) for state in states for module in state.modules[:1]]

    _fsdp_param_group = property(lambda view: view if view._state.group.parameters else None)
    _fsdp_param_groups = property(lambda view: [view] if view._state.group.parameters else [])

    def _root_post_backward_final_callback(self) -> None:
        """End a backward: reduce remaining gradients, and wait for the reductions if it is the last backward."""
        root_of(self._state).end_backward()

    _pre_forward = property(lambda view: wrapped_hook(partial(_pre_forward_through_others, view._state)))
    _post_forward = property(lambda view: wrapped_hook(ModuleHooks(view._state).post_forward))

    @property
    def _post_forward_hook_handle(self) -> RemovableHandle:
        return self._post_forward_handle

    @_post_forward_hook_handle.setter
    def _post_forward_hook_handle(self, handle: RemovableHandle) -> None:
        """Replace our hook by a client's, which must also be called after a forward that raised, as ours is."""
        self._post_forward_handle = handle
        module = self._reference()
        if handle.id in module._forward_hooks:
            module._forward_hooks_always_called[handle.id] = True

    @property
    def _mp_policy(self) -> Any:
        """The policy of the call, of torch's class unless it has a field that torch's lacks."""
        policy = self._state.options.precision
        given = {name: value for name, value in vars(policy).items() if value is not None}
        known = {field.name for field in fields(torch_fsdp.MixedPrecisionPolicy)}
        return torch_fsdp.MixedPrecisionPolicy(**given) if given.keys() <= known else policy

    mp_policy = _mp_policy

    # -- names of the parameter group

    _module_fqn = property(attrgetter("_state.name"))

    pre_backward = _replaceable("pre_backward")
    post_backward = _replaceable("post_backward")

    fsdp_params = property(lambda view: [ClientParam(parameter) for parameter in view._state.group.parameters])

    @property
    def mesh_info(self) -> Any:
        """Torch's ``FSDPMeshInfo``, ``HSDPMeshInfo`` or ``DDPMeshInfo``."""
        axes = self._state.group.axes
        if axes.mesh.ndim > 1:
            return HSDPMeshInfo(axes.mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        if axes.shard.size == axes.mesh.size():
            return FSDPMeshInfo(axes.mesh, shard_mesh_dim=0)
        return DDPMeshInfo(axes.mesh, replicate_mesh_dim=0)

    def _set_post_forward_mesh(self, info: FSDPMeshInfo | None) -> None:
        shards = self._state.group.axes.shard.size
        size = info is not None and (info.shard_mesh_size == shards or info.shard_mesh_size)
        self._state.change(reshard=Reshard.parse(size, shards))

    post_forward_mesh_info = property(None, _set_post_forward_mesh)

    @property
    def _reshard_after_forward(self) -> bool:
        """True if backward always gathers again.

        False if that depends: for the root, and on accelerators if the user passed no ``reshard_after_forward``. Tensor
        subclasses that gather differently in forward and backward rely on it.
        """
        kind = self._state.options.reshard.kind
        if kind is not ReshardKind.AUTO:
            return kind is not ReshardKind.NEVER
        root = self._state.root
        return root is None or (root.root_state is not self._state and not root.streams.device.has_streams)

    @property
    def _training_state(self) -> TrainingState:
        """The current pass in torch's terms, without the ends of a module's own forward and backward."""
        root = self._state.root
        if root is None or root.current_pass is Pass.IDLE:
            return TrainingState.IDLE
        computes = bool(self._state.calls_under_way)  # also recomputation in backward under activation checkpointing
        is_forward = computes or root.current_pass is Pass.FORWARD
        return TrainingState.FORWARD if is_forward else TrainingState.PRE_BACKWARD

    @_training_state.setter
    def _training_state(self, state: TrainingState) -> None:
        """Accept ``IDLE``, which clients set before ``reshard()``, without effect: ``reshard()`` needs no state."""
        if state is not TrainingState.IDLE:
            raise UnsupportedError(f"_training_state cannot be set to {state.name} here; it follows the passes.")

    def _pre_backward(self, call: ForwardCall) -> None:
        root_of(self._state).pre_backward(call)

    def _post_backward(self, deliver: Callable[[], None] | None = None) -> None:
        if deliver is not None:  # the reduction that the root is about to launch
            deliver()
            return
        state, root = self._state, root_of(self._state)
        root.notice_gradients(state)
        root.reduce_gradients(state, at_end=True)
        if state.options.reshard_after_backward:
            state.group.reshard()


class ClientParam:
    """View of a sharded parameter with the attributes of torch's ``FSDPParam``."""

    __slots__ = ("_parameter",)

    def __init__(self, parameter: ShardedParameter) -> None:
        self._parameter = parameter

    __getattr__ = _refuse
    __setattr__ = _set_known

    sharded_param = property(attrgetter("_parameter.sharded"))
    unsharded_param = _unsharded_param = property(attrgetter("_parameter.unsharded"))
    _param_fqn = property(attrgetter("_parameter.name"))
    _orig_dtype = orig_dtype = property(attrgetter("_parameter.sharded.dtype"))
    _orig_size = property(attrgetter("_parameter.sharded.shape"))
    sharded_size = property(lambda view: view._parameter.sharded.to_local().shape)


class TorchViews(Observer):
    """Registers a view of each module's FSDP state where torch looks for its own, and marks it as sharded."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        for module, handles in modules.items():
            set_torch_state(module, ClientState(state, module, handles))


def client_state(module: nn.Module) -> ClientState | None:
    """Return what torch's ``fully_shard.state(module)`` finds, or ``None`` if this package did not shard it."""
    state = find_state(module)
    return state if isinstance(state, ClientState) else None
