"""Views of FSDP states and groups under the private names of torch's FSDP2, for torch's tools and other libraries.

Pipelining ends gradient accumulation itself, and the memory tracker wraps our hooks. Both find a module's state with
torch's ``fully_shard.state(module)`` or ``module._get_fsdp_state()``; other libraries use torch's
``_get_module_fsdp_state(module)`` too. These functions return a view that reads everything from the FSDP state and
stores only the handles of hooks that clients replace. It has the names that ``torch.distributed.pipelining``,
``FSDPMemTracker``, torch's ``register_fsdp_forward_method`` and ``share_comm_ctx``, verl and TransformerEngine use.
Reading or setting any other name is an error that says what to use instead.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.state import ForwardCall, FSDPState, ModuleReference
from composable_fsdp._runtime.groups.state_machine import HELD_GRADIENTS, Pass
from composable_fsdp._runtime.hooks import HookHandles, hooks_for_clients
from composable_fsdp._runtime.lazy_init import iteration_of, known_iteration
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp._torch_compat.torch_types import (
    TorchFSDPMeshInfo,
    TorchFSDPState,
    TrainingState,
    find_state,
    mesh_info_of,
    register_state,
    set_torch_state,
)
from composable_fsdp.errors import ConfigurationError, UnsupportedError
from composable_fsdp.policies import AUTO_RESHARD, Reshard, ReshardKind

__all__ = ["ClientState", "client_state", "register_client_states"]


_POLICY = "the mp_policy that was passed to fully_shard"
_SHARD = "the DTensor of the module: its shape, dtype and to_local()"
_INSTEAD = {
    "_all_gather_process_group": "get_group() of the mesh that was passed to fully_shard",
    "_all_gather_result": "reshard() of the module frees what was gathered too early",
    "_all_reduce_hook": "set_all_reduce_hook() of the module",
    "_init_mp_dtypes": "nothing: a change of requires_grad is noticed",
    "_is_hsdp": "the mesh that was passed to fully_shard",
    "_lazy_init": "a forward of the model",
    "_modules_to_run_forward": "forward hooks of the modules",
    "_mp_policy": _POLICY,
    "_orig_dtype": _SHARD,
    "_orig_size": _SHARD,
    "_param_fqn": "named_parameters() of the model",
    "_module_info": "named_parameters() of the model",
    "_reduce_dtype": _POLICY,
    "_reduce_scatter_process_group": "get_group() of the mesh that was passed to fully_shard",
    "_sharded_param_data": _SHARD,
    "_sharded_state": "parameters() of the module, which are DTensors while it is sharded",
    "_states_to_backward_prefetch": "set_modules_to_backward_prefetch(modules) of the module; "
    "set_prefetch_limit(0) of the model prefetches nothing",
    "_states_to_forward_prefetch": "set_modules_to_forward_prefetch(modules) of the module",
    "accumulate_unsharded_grad_if_needed": "nothing: post_backward() finds the gradients",
    "all_gather_outputs": "unsharded_param of the parameter, while the module is unsharded",
    "all_reduce_grads": "set_requires_all_reduce() of the module",
    "finalize_backward": "finalize_backward() of the model",
    "force_sum_reduction_for_comms": "set_force_sum_reduction_for_comms() of the module",
    "gradient_divide_factor": "set_gradient_divide_factor() of the module",
    "is_last_backward": "set_is_last_backward() of the model",
    "is_sharded": "parameters() of the module, which are DTensors while it is sharded",
    "is_sharded_post_forward": "parameters() of the module, which are DTensors while it is sharded",
    "is_unsharded": "parameters() of the module, which are DTensors while it is sharded",
    "lazy_hsdp_allreduce": "set_requires_all_reduce(False) of the module, until the last microbatch",
    "lazy_init": "a forward of the model",
    "mp_policy": _POLICY,
    "orig_dtype": _SHARD,
    "padded_sharded_param_size": _SHARD,
    "param_dtype": _POLICY,
    "reduce_grads": "set_requires_gradient_sync() of the module",
    "reshard": "reshard() of the module",
    "reshard_after_backward": "set_reshard_after_backward() of the module",
    "sharded_size": _SHARD,
    "to_accumulated_grad_if_needed": "nothing: post_backward() finds the gradients",
    "to_sharded": "reshard() of the module",
    "to_unsharded": "unshard() of the module",
    "unshard": "unshard() of the module",
    "unsharded_accumulated_grad": "get_pending_gradients() and zero_grad() of the module",
    "wait_for_unshard": "wait() of the handle that unshard(async_op=True) of the module returns",
}
"""The remedies for names of torch's states, groups and parameters that public code uses and these views lack."""


class _MissingNameError(UnsupportedError, AttributeError):
    """A name of torch's private classes that a view lacks. ``getattr`` with a default gives the default."""


def _missing(view: object, name: str) -> _MissingNameError:
    torch_name = f"FSDP{type(view).__name__.removeprefix('Client')}.{name}".replace("FSDPGroup", "FSDPParamGroup")
    instead = _INSTEAD.get(name, "the methods of the module, see docs/upstream-main.md")
    return _MissingNameError(f"{torch_name.replace('FSDPParameter', 'FSDPParam')} does not exist here. Use {instead}.")


def _get_other(view: object, name: str) -> Any:
    """Raise for a name that ``view`` lacks, or again what a property of this name raised."""
    if name.startswith("__") or hasattr(type(view), name):
        return object.__getattribute__(view, name)
    raise _missing(view, name)


def _set_known(view: object, name: str, value: object) -> None:
    """Set an attribute of a view, but none that only torch's objects have: it would have no effect.

    A library may keep marks of its own on the view of a state, but not on those of groups and parameters: they are made
    anew for each access.
    """
    is_mark = isinstance(view, ClientState) and name not in _INSTEAD and name not in _NAMES_OF_TORCH
    if not is_mark and not hasattr(type(view), name) and name not in _STORED:
        raise _missing(view, name)
    object.__setattr__(view, name, value)


_STORED = ("_state", "_reference", "_pre_forward_hook_handle", "_post_forward_handle")
"""The attributes of ``ClientState`` that are not properties."""

_NAMES_OF_TORCH = frozenset(TorchFSDPState.__init__.__code__.co_names)
"""The names that the constructor of torch's ``FSDPState`` uses, among them those of all its attributes."""


def _set_streams(view: ClientState | ClientGroup, streams: CommStreams) -> None:
    iteration_of(view._state).streams = streams


_streams_view: Any = property(lambda view: iteration_of(view._state).streams, _set_streams)


class ClientState:
    """View of the FSDP state of ``module`` with the attributes of torch's ``FSDPState``.

    It passes ``isinstance`` for torch's class without being a subclass, so it inherits no code from torch. All modules
    of a list have equal views and one group, as they share one state in torch.
    """

    def __init__(self, state: FSDPState, module: nn.Module, handles: HookHandles | None) -> None:
        self._state = state
        self._reference = ModuleReference(module)
        if handles is not None:  # None for a module that is inside another one of the list
            self._pre_forward_hook_handle = handles.pre_forward
            self._post_forward_handle = handles.post_forward

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return TorchFSDPState

    __getattr__ = _get_other
    __setattr__ = _set_known

    def __eq__(self, other: object) -> bool:
        return type(other) is ClientState and other._state is self._state

    def __hash__(self) -> int:
        return hash(self._state)

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientState:
        clone = object.__new__(ClientState)
        memo[id(self)] = clone
        vars(clone).update(copy.deepcopy(vars(self), memo))
        register_state(clone._module, clone)
        return clone

    _comm_ctx = _streams_view

    @property
    def _is_root(self) -> bool | None:
        """``None`` before the first forward, as with torch."""
        iteration = known_iteration(self._state)
        return None if iteration is None else iteration.root is self._state

    @_is_root.setter
    def _is_root(self, value: bool) -> None:
        raise ConfigurationError(
            f"torch's own fully_shard has sharded a module around {self._state.class_name}, which ours has sharded. "
            "Shard all of a model by one of them; composable_fsdp.interop.patch_torch(), called before, makes callers "
            "of torch's use ours."
        )

    @property
    def _auto_reshard_after_forward(self) -> bool:
        """True if the user passed no ``reshard_after_forward``."""
        return self._state.reshard.kind is ReshardKind.AUTO

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, auto: bool) -> None:
        if auto:
            self._state.reshard = AUTO_RESHARD
        elif self._auto_reshard_after_forward:
            self._state.reshard = Reshard(ReshardKind.ALWAYS)

    @property
    def _module(self) -> nn.Module:
        return self._reference()

    @property
    def _state_ctx(self) -> ClientState:
        """The object shared by all states of a root. Each view can serve as it."""
        return self

    @property
    def all_states(self) -> list[ClientState]:
        """The views of all FSDP states of the root, in the order of its modules."""
        states = iteration_of(self._state).states.values()
        found = [client_state(module) for state in states for module in state.modules[:1]]
        return [each for each in found if each is not None]

    @property
    def _fsdp_param_groups(self) -> list[ClientGroup]:
        return [ClientGroup(self._state, self._module)] if self._state.group.parameters else []

    @property
    def _fsdp_param_group(self) -> ClientGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    def _root_post_backward_final_callback(self) -> None:
        """End a backward: reduce remaining gradients, and wait for the reductions if it is the last backward."""
        iteration_of(self._state).end_backward()

    _pre_forward = property(lambda view: hooks_for_clients(view._state).pre_forward)
    _post_forward = property(lambda view: hooks_for_clients(view._state).post_forward)

    @property
    def _post_forward_hook_handle(self) -> RemovableHandle:
        return self._post_forward_handle

    @_post_forward_hook_handle.setter
    def _post_forward_hook_handle(self, handle: RemovableHandle) -> None:
        """Replace our hook by a client's, which must also be called after a forward that raised, as ours is."""
        self._post_forward_handle = handle
        if handle.id in self._module._forward_hooks:
            self._module._forward_hooks_always_called[handle.id] = True


class ClientGroup:
    """View of the parameter group of ``state`` with the attributes of torch's ``FSDPParamGroup``.

    Views of one state are equal. A function set as ``pre_backward`` or ``post_backward`` runs in place of the original
    and calls it with the arguments it got. For a list of modules, setting them has an effect only through the first
    module: a client that visits every module would otherwise have its function called once per module.
    """

    __slots__ = ("_is_of_first", "_state")

    def __init__(self, state: FSDPState, module: nn.Module) -> None:
        self._state = state
        self._is_of_first = module is state.modules[0]

    __getattr__ = _get_other
    __setattr__ = _set_known

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientGroup) and other._state is self._state

    def __hash__(self) -> int:
        return hash(self._state)

    comm_ctx = _streams_view

    @property
    def _module_fqn(self) -> str | None:
        """The names of the modules from the root, "" for the root; ``None`` before the first forward, as with torch."""
        iteration = known_iteration(self._state)
        if iteration is None:
            return None
        return "" if iteration.root is self._state else self._state.name

    @property
    def mesh_info(self) -> Any:
        """Torch's ``FSDPMeshInfo``, ``HSDPMeshInfo`` or ``DDPMeshInfo``."""
        return mesh_info_of(self._state.group.axes)

    @property
    def _training_state(self) -> TrainingState:
        """The current pass in torch's terms, without the ends of a module's own forward and backward."""
        state, iteration = self._state, known_iteration(self._state)
        if iteration is None or iteration.current_pass is Pass.IDLE:
            return TrainingState.IDLE
        computes = bool(state.calls_under_way)  # includes recomputation in backward under activation checkpointing
        return (
            TrainingState.FORWARD if computes or iteration.current_pass is Pass.FORWARD else TrainingState.PRE_BACKWARD
        )

    @_training_state.setter
    def _training_state(self, state: TrainingState) -> None:
        """Accept ``IDLE``, which clients set before ``reshard()``, without effect: ``reshard()`` needs no state."""
        if state is not TrainingState.IDLE:
            raise UnsupportedError(f"_training_state cannot be set to {state.name} here; it follows the passes.")

    # -- options

    @property
    def _reshard_after_forward(self) -> bool:
        """True if backward always gathers again.

        False if that depends: for the root, and on accelerators if the user passed no ``reshard_after_forward``. Tensor
        subclasses that gather differently in forward and backward rely on it.
        """
        kind = self._state.reshard.kind
        if kind is not ReshardKind.AUTO:
            return kind is not ReshardKind.NEVER
        iteration = known_iteration(self._state)
        return iteration is None or (iteration.root is not self._state and not iteration.streams.device.has_streams)

    @property
    def post_forward_mesh_info(self) -> Any:
        """The mesh from which backward gathers the parameters, or ``None`` if they stay unsharded after forward."""
        if self._state.reshard.kind is ReshardKind.SMALLER:
            raise UnsupportedError(
                f"post_forward_mesh_info of {self._state.name!r}: the mesh of reshard_after_forward="
                f"{self._state.reshard.mesh_size} has no DeviceMesh in this version."
            )
        return self.mesh_info if self._reshard_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: TorchFSDPMeshInfo | None) -> None:
        shard_size = self._state.group.axes.shard.size
        if info is None:
            self._state.reshard = Reshard(ReshardKind.NEVER)
        elif info.shard_mesh_size == shard_size:
            self._state.reshard = Reshard(ReshardKind.ALWAYS)
        else:
            self._state.reshard = Reshard.parse(info.shard_mesh_size, shard_size)

    # -- passes

    @property
    def fsdp_params(self) -> list[ClientParameter]:
        return [ClientParameter(self._state, parameter) for parameter in self._state.group.parameters]

    @property
    def pre_backward(self) -> Callable[..., None]:
        return (self._is_of_first and self._state.client.pre_backward) or self._pre_backward

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        if self._is_of_first:
            self._state.client = self._state.client._replace(pre_backward=function)

    @property
    def post_backward(self) -> Callable[..., None]:
        return (self._is_of_first and self._state.client.post_backward) or self._post_backward

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        if self._is_of_first:
            self._state.client = self._state.client._replace(post_backward=function)

    def _pre_backward(self, call: ForwardCall) -> None:
        iteration_of(self._state).pre_backward(call)

    def _post_backward(self, deliver: Callable[[], None] | None = None) -> None:
        """Reduce accumulated gradients, and reshard if the options say so.

        Args:
            deliver: the reduction that the iteration is about to launch; if given, only this is called.
        """
        if deliver is not None:
            deliver()
            return
        state, iteration = self._state, iteration_of(self._state)
        gradients = state.group.gradients
        gradients.notice()  # zero-bubble schedules accumulate weight gradients themselves
        if gradients.were_summed and gradients.state not in HELD_GRADIENTS and iteration.was_reached(state):
            warnings.warn(_lost_gradients(state), stacklevel=2)
        iteration.reduce_gradients(state, at_end=True)
        if state.reshard_after_backward:
            state.group.reshard()


def _lost_gradients(state: FSDPState) -> str:
    return (
        f"backward went through {state.name!r}, but left no gradient on any of its parameters. Pipeline schedules that "
        "compute the gradients of weights apart from those of inputs, such as zero bubble, look for the parameters "
        "before backward brings them into memory: shard their stages with reshard_after_forward=False."
    )


class ClientParameter:
    """View of a sharded parameter with the attributes of torch's ``FSDPParam``."""

    __slots__ = ("_parameter", "_state")

    def __init__(self, state: FSDPState, parameter: ShardedParameter) -> None:
        self._state = state
        self._parameter = parameter

    __getattr__ = _get_other
    __setattr__ = _set_known

    sharded_param = property(attrgetter("_parameter.sharded"))
    unsharded_param = _unsharded_param = property(attrgetter("_parameter.unsharded"))


def register_client_states(
    state: FSDPState, modules: Iterable[nn.Module], handles: Mapping[nn.Module, HookHandles]
) -> None:
    """Register a view for each of ``modules`` where torch looks for its state, and mark them as sharded."""
    for module in modules:
        set_torch_state(module, ClientState(state, module, handles.get(module)))


def client_state(module: nn.Module) -> ClientState | None:
    """Return what torch's ``fully_shard.state(module)`` finds, or ``None`` if this package did not shard it."""
    state = find_state(module)
    return state if isinstance(state, ClientState) else None
