"""The state of one ``fully_shard`` call, and its calls; hooks of the process that live as long as states do."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp._core.comm import Communicator, is_over_group
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import Event
from composable_fsdp._core.params import ShardedParameter, find_parameter
from composable_fsdp._core.pytree import NO_INPUTS, CallInputs
from composable_fsdp.errors import ConfigurationError, LifecycleError
from composable_fsdp.policies import MixedPrecisionPolicy, Reshard, ReshardKind

_STATE_ATTRIBUTE = "_composable_fsdp_state"
ROOT_ATTRIBUTE = "_composable_fsdp_root"
"""The attribute of a root's modules with the ``Root``. A copied module has none until it runs."""


class Accumulation(Enum):
    """The handling of one microbatch's gradients."""

    REDUCE = "reduce"
    """Reduce, and set or add to the sharded gradients."""
    SHARDED = "sharded"
    """Reduce over the shard axis, and sum in the reduce dtype until a backward with REDUCE."""
    UNSHARDED = "unsharded"
    """Sum the full gradients in the reduce dtype, without communication, until a backward with another value."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an FSDP state. A setter replaces the value, so its identity tells that something has changed.

    Most take effect at once, those of a root in the next forward, and ``reductions_in_flight`` in the next backward.
    """

    reshard: Reshard
    """The parameters after forward: freed, kept, or kept as a slice."""
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    """The dtypes of inputs, parameters, reduction and outputs."""
    reshard_after_backward: bool = True
    """Free the parameters after backward."""
    unshard_in_backward: bool = True
    """Backward needs the parameters."""
    accumulation: Accumulation = Accumulation.REDUCE
    """The handling of this microbatch's gradients."""
    all_reduce: bool = True
    """Reduce over the replicate axis too."""
    reduced_by_observer: bool = False
    """An observer launches the reductions. Ranks may hold other groups until then, so that none is fused."""
    reductions_in_flight: int | None = None
    """The number of reductions in flight. The largest number of a root's states counts."""
    forward_prefetch: tuple[ref[FSDPState], ...] | None = None
    """The states to prefetch in forward, if the user has chosen them."""
    backward_prefetch: tuple[ref[FSDPState], ...] | None = None
    """The states to prefetch in backward, if the user has chosen them."""

    # Of a root, whose values count for all of its states: ROOT_OPTIONS, and those of plugins.

    max_unsharded_bytes: int | None = None
    """The bound for prefetching, in bytes of unsharded parameters."""
    prefetch_limit: int | None = None
    """The number of groups to prefetch, if the user has set it."""
    max_fused_bytes: int | None = None
    """The size up to which adjacent small groups share an all-gather or a reduction, if the user has set it."""
    of_plugins: Mapping[str, Any] = field(default_factory=dict)
    """Options that plugins read, by their names in errors."""


ROOT_OPTIONS = ("max_unsharded_bytes", "prefetch_limit", "max_fused_bytes")
"""The names of the core's options that have one value for all states of a root."""


class Kept(NamedTuple):
    """A group that stays unsharded between passes: its version then, and the optimizer steps that it includes."""

    version: int
    steps: object
    is_frozen: bool
    """True if it stays so, and has no parameter that an optimizer could change."""


class BackwardWrappers(NamedTuple):
    """Wrappers that a client put around the root's pre-backward and post-backward."""

    pre_backward: Callable[..., None] | None = None
    post_backward: Callable[..., None] | None = None


class ForwardRecord:
    """The events of one forward. Its autograd graph refers to it; the planner and the progress keep some records.

    Attributes:
        events: the pre-forward events, which the planner appends, and the post-forward events, in order.
        ended: the groups to which a backward may come back, in the order in which they ended. A *position* counts them.
        fused: the fusions of groups in this forward and its backward.
        ends_without_hook: the positions of runs whose end in backward no hook shows. Note: ends that no hook sees.
        awaited: the number of calls of each state whose end in backward a hook shows.
    """

    def __init__(self, fused: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.events: list[Event] = []
        self.ended: list[str] = []
        self.fused = fused or {}
        self.ends_without_hook: set[int] = set()
        self.awaited: dict[FSDPState, int] = {}

    def end(self, event: Event, *, leads_to_backward: bool) -> int:
        """Append the post-forward event of a group. Return its position, or -1 if no backward comes back to it."""
        self.events.append(event)
        if not leads_to_backward:
            return -1
        self.ended.append(event.group)
        return len(self.ended) - 1

    def abort(self, event: Event) -> None:
        """Remove the last ``event``, the pre-forward of a group whose forward raised an error."""
        index = len(self.events) - 1 - self.events[::-1].index(event)
        del self.events[index]


NO_RECORD = ForwardRecord()
"""The record of runs that have not ended, and of recomputations without grad. Nothing is written to it."""


# Note: run and call
#
# A call is one forward of one module. A run is what unshards and reshards a group once: of a group of one module, each
# call is a run. ``fully_shard([a, b])`` makes one group of two modules: ``a(x); b(y)`` are two calls and one run, which
# begins before ``a`` and ends after ``b``. All calls of a run have it as ``call.run``.
# A module that is called three times before its backward makes three runs, and three positions in the record.
# A recomputation by activation checkpointing is a run of its own, outside of that record: the backward that caused it
# is under way, so it is gathered eagerly and never freed by its own end.


class Run:
    """One use of a group in a forward, from the first module that begins to the last one that ends.

    Attributes:
        remaining: the ids of the modules that have not run yet; ``None`` for a group of one module.
        planned: the part of the plan for the run; ``None`` if none was made.
        record: the record of the forward, once it has the end of the run.
        position: the index of the run in the record.
        versions: the versions of the parameters, if an observer compares them in backward.
        awaited: the number of calls whose input gradients are not ready yet.
    """

    # Defaults of the class, as in ForwardCall.
    remaining: set[int] | None = None
    planned: Any = None
    record: ForwardRecord = NO_RECORD
    position: int = -1
    versions: Any = None
    awaited: int = 0


# Note: counters of a call
#
# ``record.awaited``: calls of a forward with a hook on their inputs. ``run.awaited``: hooks of the run that have not
# fired yet, over all backwards. ``state.open_calls``: hooks that this backward must still see before the gradients of
# the group are complete, over all forwards that it has reached. ``call.entered``: the backward that was last here.

NO_RUN = Run()
"""The run of calls inside another call of the same state. Nothing is written to it."""


class ForwardCall:
    """One forward call of a module, from its beginning to the end of its backward.

    The state owns it while the module runs, and then the autograd graph. Calls without grad, and calls inside another
    call of the same state, end with forward.

    Args:
        state: the state of the module.
        root: the root that the call is a part of.
        caller: the Python frame that runs the call, until the call ends.
        handled_exception: the exception that was being handled when the call began. If another one is at its end, the
            call raised it.
        is_inner: True if the call is inside another call of the same state, e.g. ``forward`` in a registered
            ``generate``.
    """

    # Defaults of the class: an assignment to each in ``__init__`` would take host time in every call.
    run: Run = NO_RUN
    inputs: CallInputs = NO_INPUTS
    at_end: Callable[[], None] | None = None
    """Called when the call ends, also after an exception. Set by an observer."""
    is_recomputed: bool = False
    """True if it ran inside a backward. That backward may never reach its inputs: some recomputations only refill."""
    entered: int = -1
    """The number of the backward in which a gradient last reached an output of this call."""

    def __init__(
        self,
        state: FSDPState,
        root: Any,
        caller: FrameType | None = None,
        handled_exception: BaseException | None = None,
        is_inner: bool = False,
    ) -> None:
        self.state, self.root, self.is_inner = state, root, is_inner
        self.caller, self.handled_exception = caller, handled_exception
        self.thread = threading.get_ident()

    @property
    def name(self) -> str:
        """The name of the group, for labels."""
        return self.state.group.name

    def end(self) -> CallInputs:
        """End the call: release what belongs to its Python frame, and the caller's containers. Return its inputs."""
        inputs, self.inputs = self.inputs, NO_INPUTS
        self.caller = self.handled_exception = None
        if inputs.containers:
            inputs.give_back()
        if self.at_end is not None:
            self.at_end()
            self.at_end = None
        return inputs

    # -- backward

    def on_output_gradient(self, _: object) -> None:
        """Begin the backward of this call; the hook for the nodes of its outputs."""
        state = self.state
        root = state._root() or self.root
        if self.entered != root.progress.number:  # else one reached another output
            (state.backward_wrappers.pre_backward or root.pre_backward)(self)

    def on_last_input_gradient(self, gradients: Sequence[torch.Tensor | None] = (), _: object = None) -> None:
        """End the backward of this call; the hook for the nodes of its inputs."""
        if torch.is_grad_enabled():  # with create_graph
            self.enter_by(gradients)
        (self.state._root() or self.root).post_backward(self)

    def enter_by(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let a later backward, as of a gradient penalty, enter this call by ``gradients`` of its inputs."""
        for gradient in gradients:
            if gradient is not None and gradient.grad_fn is not None:
                gradient.grad_fn.register_prehook(self.on_output_gradient)

    def end_without_hook(self) -> None:
        """Note that no hook will report the gradients of this call's inputs."""
        self.run.record.ends_without_hook.add(self.run.position)

    def await_inputs(self) -> None:
        """Note that a hook will report the gradients of this call's inputs."""
        self.run.awaited += 1
        awaited = self.run.record.awaited
        awaited[self.state] = awaited.get(self.state, 0) + 1


class FSDPState:
    """The modules of one ``fully_shard`` call, in the order given, and their parameter group.

    Args:
        modules: the modules that unshard and reshard the group; none contains another.
        group: the parameters of the call.
        options: the options, until a setter replaces them.
        owner_states: the states whose groups own parameters that these modules use too. They are unsharded together.
    """

    def __init__(
        self, modules: Sequence[nn.Module], group: ParamGroup, options: Options, owner_states: Sequence[FSDPState] = ()
    ) -> None:
        # Of the call of ``fully_shard``.
        self.module_refs = tuple(map(ref, modules))
        self.group = group
        self.options = options
        self.owner_states = tuple(owner_states)
        self.user_states: list[ref[FSDPState]] = []
        """The states that use parameters which this one's group owns."""
        for owner in self.owner_states:
            owner._add_user(self)
        self.has_nested_states = any(find_state(m) not in (None, self) for module in modules for m in module.modules())
        # Of the current pass.
        self.calls_under_way: list[ForwardCall] = []
        """The forward calls on the Python stack, innermost last."""
        self.run: Run | None = None
        """The current forward run of the modules."""
        self.open_calls = 0
        """The number of calls, of forwards that this backward has reached, whose input gradients it has not."""
        # Between passes.
        self.kept: Kept | None = None
        """Set while the group is kept unsharded between passes."""
        self.keeps_unsharded: bool | None = None
        """True or False if an observer has decided that the group stays unsharded after the forward, or not."""
        self.backward_wrappers = BackwardWrappers()
        self._root: Callable[[], Any] = _no_root
        for module in modules:
            self.attach(module)
        group.owner = ref(self)
        for parameter in group.parameters:
            parameter.state_ref = ref(self)

    def add_owner(self, owner: FSDPState) -> None:
        """Add ``owner``, whose group owns a parameter that these modules use too."""
        if owner not in self.owner_states:
            self.owner_states = (*self.owner_states, owner)
            owner._add_user(self)

    def _add_user(self, user: FSDPState) -> None:
        self.user_states.append(ref(user, self.user_states.remove))

    def change(self, **options: Any) -> None:
        """Replace ``options`` by other values, if they are."""
        if any(getattr(self.options, name) != value for name, value in options.items()):
            self.options = replace(self.options, **options)

    def change_for_plugin(self, name: str, value: object) -> None:
        """Replace the option ``name`` of a plugin."""
        self.change(of_plugins={**self.options.of_plugins, name: value})

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules in the order given, without those that were garbage-collected."""
        return tuple(module for known in self.module_refs if (module := known()) is not None)

    @property
    def class_name(self) -> str:
        """The original class names of the modules, for errors."""
        return ", ".join(type(module).__name__.removeprefix("FSDP") for module in self.modules)

    @property
    def root(self) -> Any:
        """The ``Root`` of the state, or ``None`` before it is assembled and after the root is dropped."""
        return self._root()

    @root.setter
    def root(self, root: object) -> None:
        self._root = _no_root if root is None else ref(root)

    def drain_before_changes(self) -> None:
        """Complete the reductions in flight of parameters whose ``requires_grad`` has changed."""
        root = self.root
        if root is not None:
            root.drain_before_changes()

    def reshard(self) -> None:
        """Free the unsharded parameters, on behalf of a user. Passes free them by :meth:`ParamGroup.reshard`."""
        if self.root is not None:
            for observe in self.root.observers.before_reshard:
                observe(self.root, self)
        self.group.reshard()

    def rebuild(self) -> None:
        """Reshard, and rebuild the tensors of the group after a change that its plan depends on."""
        self.reshard()
        self.group.rebuild()

    def note_kept(self, steps: object) -> None:
        """Record that the group stays unsharded. ``steps``: the optimizer steps at its all-gather, or earlier ones."""
        is_frozen = (
            not self.options.reshard_after_backward
            and not self.group.plan.num_trainable
            and all(parameter.sharded.grad is None for parameter in self.group.parameters)
        )
        self.kept = Kept(self.group.version, steps, is_frozen)

    def __repr__(self) -> str:
        return f"FSDPState({self.name!r}, {len(self.group.parameters)} parameters)"

    @property
    def name(self) -> str:
        return self.group.name

    def attach(self, module: nn.Module) -> None:
        """Make this the state of ``module``."""
        vars(module)[_STATE_ATTRIBUTE] = self

    def registered_parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter that this state may have registered on its modules."""
        for parameter in self.group.parameters:
            yield parameter.sharded
            yield parameter.unsharded

    @property
    def is_running(self) -> bool:
        """True while a forward of one of the modules runs."""
        return bool(self.calls_under_way) or self.run is not None

    @property
    def is_in_use(self) -> bool:
        """True while a forward runs that uses parameters of the group: of this state or of another one."""
        if self.calls_under_way or self.run is not None:
            return True
        return bool(self.user_states) and any(user.is_running for user in alive(self.user_states))

    @property
    def is_shared(self) -> bool:
        """True if the modules use parameters of other groups, or other states those of this one."""
        return bool(self.owner_states or self.user_states)

    @property
    def keeps_partial(self) -> bool:
        """True if a reduction now ends after the shard axis."""
        if self.options.all_reduce:
            return self.options.accumulation is Accumulation.SHARDED
        replicates = any(pgs.replicate.size > 1 for pgs in self.group.process_groups)
        return replicates or self.options.accumulation is Accumulation.SHARDED

    @property
    def is_synchronized(self) -> bool:
        """True if the gradients of this microbatch are reduced over all data-parallel ranks."""
        return self.options.accumulation is Accumulation.REDUCE and not self.keeps_partial

    @property
    def can_be_fused(self) -> bool:
        """True if collectives of this group may be fused with those of other groups."""
        options = self.options
        chosen = options.forward_prefetch is not None or options.backward_prefetch is not None
        if self.is_shared or chosen or options.reshard.kind is ReshardKind.SMALLER or options.reduced_by_observer:
            return False
        return not self.group.plan.is_custom


class ModuleReference:
    """A weak reference to the module that owns the holder. A deep copy refers to the copied module."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __call__(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module owns what asks"
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleReference:
        return ModuleReference(copy.deepcopy(self(), memo))


def _no_root() -> None:
    """Return ``None``, as a dead reference to a root would."""


def alive(references: Sequence[ref[FSDPState]]) -> list[FSDPState]:
    """Return the states that still exist."""
    return [state for known in references if (state := known()) is not None]


def state_of_parameter(parameter: object) -> FSDPState | None:
    """Return the state whose group owns ``parameter``, a ``ShardedParameter`` or either of its forms, or ``None``."""
    found = parameter if isinstance(parameter, ShardedParameter) else find_parameter(parameter)
    return found.state_ref() if found is not None and found.state_ref is not None else None


def connections(states: Iterable[FSDPState]) -> list[dist.ProcessGroup]:
    """Return the process groups over which ``states`` communicate, without duplicates."""
    communicators: list[Communicator] = []
    for state in states:
        for pgs in state.group.process_groups:
            communicators += [pgs.axes.shard, pgs.axes.replicate, pgs.scatter]
        communicators += [slices.pgs.gather for slices in state.group.slices]
    return list(dict.fromkeys(c.group for c in communicators if is_over_group(c)))


def find_state(module: nn.Module) -> FSDPState | None:
    """Return the state that ``fully_shard`` attached to ``module``, or ``None``."""
    state = vars(module).get(_STATE_ATTRIBUTE)
    return state if isinstance(state, FSDPState) else None


def states_below(module: nn.Module) -> list[FSDPState]:
    """Return the FSDP states of ``module`` and its submodules, each once."""
    return list(dict.fromkeys(state for m in module.modules() if (state := find_state(m)) is not None))


def state_of(module: nn.Module) -> FSDPState:
    """Return the state of ``module``, or raise a ``LifecycleError`` if it has none."""
    state = vars(module).get(_STATE_ATTRIBUTE)  # as find_state does, which would be another call in each forward
    if not isinstance(state, FSDPState):
        raise LifecycleError(f"{type(module).__name__} has not been sharded: call fully_shard on it first.")
    return state


class GlobalHooks:
    """Hooks that ``install`` adds to the process. It returns the function that removes them.

    A state ends wherever Python frees it: in any thread, or in the garbage collector. So the lock is reentrant. Torch
    must not lose an optimizer hook while it runs the hooks, so they stay if the last state ends inside of ``with`` this
    object. The next state to end then removes them.
    """

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        self._remove: Callable[[], None] | None = None
        self._states: set[ref[FSDPState]] = set()
        self._running = 0
        self._lock = threading.RLock()

    def keep_for(self, state: FSDPState) -> None:
        """Install the hooks, if they are not installed, and keep them until ``state`` has been freed."""
        with self._lock:
            self._states.add(ref(state, self._forget))
            if self._remove is None:
                self._remove = self._install()

    def _forget(self, state: ref[FSDPState]) -> None:
        with self._lock:
            self._states.discard(state)
            if not self._states and not self._running and self._remove is not None:
                remove, self._remove = self._remove, None
                remove()

    def __enter__(self) -> None:
        """Keep the hooks until the end of the block, even without a state."""
        with self._lock:
            self._running += 1

    def __exit__(self, *_: object) -> None:
        """Allow the hooks to be removed again."""
        with self._lock:
            self._running -= 1


class Ignored:
    """The ignored modules, parameters and buffers of a ``fully_shard`` call, by id.

    Args:
        parameters: the ignored parameters.
        modules: the ignored modules; everything in and below them is ignored too.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> None:
        self._alive = [*parameters, *modules]  # keeps their ids from being reused
        self.modules = {id(m) for ignored in modules for m in ignored.modules()}
        self.parameters = {id(p) for p in parameters} | {id(p) for m in modules for p in m.parameters()}
        self.buffers = {id(b) for m in modules for b in m.buffers()}


def find_ignored(
    called: Sequence[nn.Module], parameters: Iterable[nn.Parameter] | None, modules: Collection[nn.Module] | None
) -> Ignored:
    """Check ``ignored_params`` and ``ignored_modules`` of a ``fully_shard`` call on the modules ``called``.

    Raises:
        ConfigurationError: ``modules`` is not a collection of modules, or contains one of ``called`` or one above it.
    """
    modules = modules if modules is not None else ()
    if isinstance(modules, nn.Module):
        raise ConfigurationError(f"ignored_modules must be a set or list of modules, not one {type(modules).__name__}.")
    given: Collection[object] = modules
    others = sorted({type(m).__name__ for m in given if not isinstance(m, nn.Module)})
    if others:
        raise ConfigurationError(f"ignored_modules must contain modules only, not {', '.join(others)}.")
    ignored = Ignored(tuple(parameters or ()), tuple(modules))
    for module in called:
        if id(module) in ignored.modules:
            raise ConfigurationError(
                f"ignored_modules contains the {type(module).__name__} that fully_shard was called on, or one above "
                "it. Leave out the call, or name the modules below it that are to be ignored."
            )
    return ignored
