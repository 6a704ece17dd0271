"""Observers: attachments of a root, which are told of its events, and the context that hooks leave.

A plugin appends an observer to :data:`OBSERVERS`. Each root that is assembled afterwards tells it of its events. An
event that nobody observes costs one truth test.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import PyTree
from torch.utils.hooks import RemovableHandle

from composable_fsdp._core.backward import Progress, ReductionQueue
from composable_fsdp._core.group_plan import Hook, Pass
from composable_fsdp._core.memory import CommStreams, Work
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.schedule import Planner
from composable_fsdp._core.state import ForwardCall, FSDPState


class HookHandles(NamedTuple):
    """Handles that remove the hooks around a module's forward."""

    pre_forward: RemovableHandle
    post_forward: RemovableHandle


class ObservedRoot(Protocol):
    """The members of a root that observers use."""

    root_state: FSDPState
    """The state of the root's module, which has the options of all."""
    outermost: FSDPState | None
    """The state of the outermost module of the current forward. It may be one below the root's."""
    states: Mapping[str, FSDPState]
    """All FSDP states, by name, in module order."""
    planner: Planner
    """The plan of the passes, and the record of the last forward."""
    current_pass: Pass
    queue: ReductionQueue
    progress: Progress
    """How far the current or last backward is."""
    observers: Observers
    leads_to_backward: Callable[[], bool]
    """Returns whether a backward may follow what runs now."""

    @property
    def streams(self) -> CommStreams: ...

    def may_come_back_to(self, state: FSDPState) -> bool:
        """Return whether a backward may follow a forward that has used parameters of ``state``."""

    def verify_ranks(self) -> None: ...
    def end_backward(self) -> None: ...

    def drain(self) -> None:
        """Wait for everything in flight. Afterwards all reduced gradients are set."""

    def abandon(self) -> None:
        """Give up the work in flight, which will not complete. Nothing may write to its memory any more."""


class Observer:
    """An attachment of roots. Derive from it, and override the methods of the events to observe.

    Observers of a beginning are told in the order of the list, those of an end in reverse order. The events of a step:

    - ``begin_pass``, ``begin_forward``; for each run ``begin_run``, ``enter_forward``; for each of its calls
      ``enter_call``, ``end_run``; ``end_forward``, ``before_end``, ``end_pass``;
    - ``begin_pass``; for each call ``enter_backward``, and ``begin_run``, ``enter_call`` if it is recomputed;
      ``end_backward``, ``kept``, ``before_end``, ``end_pass``.

    ``before_hook`` and ``after_hook`` are around what the root does in each hook.
    """

    is_replayed = False
    """True if it acts on the root's groups, and on nothing else, so that dry runs need it."""

    def __init_subclass__(cls) -> None:
        """Raise a ``TypeError`` if a public method has nearly the name of an event, which it would never be told of."""
        super().__init_subclass__()
        events = [name for name in vars(Observer) if not name.startswith("_")]
        for name in vars(cls):
            if name.startswith(("pre_", "post_")):
                raise TypeError(f"{cls.__name__}.{name} observes no event. Override before_hook or after_hook.")
            if not name.startswith("_") and not hasattr(Observer, name):
                for meant in difflib.get_close_matches(name, events, 1, cutoff=0.85):
                    raise TypeError(f"{cls.__name__}.{name} observes no event. Did you mean {meant}?")

    # Of the process. Only the observers in the list are told.

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        """Note that ``fully_shard`` has made ``state``. ``modules``: handles of hooks, ``None`` for inner modules."""

    def given_values(self, parameter: ShardedParameter, full: torch.Tensor) -> None:
        """Note that each rank has kept its shard of ``full``, by ``fully_shard`` or ``initialize``."""

    def after_copy(self, state: FSDPState, clone: FSDPState) -> None:
        """Note that ``clone`` is a copy of ``state``."""

    def before_assembly(self, root: FSDPState, states: Mapping[str, FSDPState]) -> None:
        """Note that ``states``, those below ``root``, are about to get a root object. It may raise."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer`` is about to step. Called while the process has FSDP states, for every optimizer."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer`` has stepped, as ``before_step`` does."""

    # Of a root. Observers binds every method below for_root (_OF_ROOTS).

    def for_root(self, root: ObservedRoot) -> Observer | None:
        """Return the observer of ``root``, which has just been assembled: this one, another one, or none."""
        return self

    def before_first_collective(self, root: ObservedRoot) -> None:
        """Compare the model between ranks, or prepare for the first step. All ranks call it together."""

    def before_first_hook(self, root: ObservedRoot) -> None:
        """Note that the root is idle, and the first hook of a pass begins. Observers may be added and removed here."""

    def begin_pass(self, root: ObservedRoot, which: Pass) -> None:
        """Note that a forward or a backward begins. Nothing is gathered yet."""

    def end_pass(self, root: ObservedRoot, which: Pass, succeeded: bool) -> None:
        """Note that a forward or a backward has ended, or was given up after an exception.

        A backward that failed is given up in ``reset_iter_state``.
        """

    def raised(self, root: ObservedRoot, call: ForwardCall, error: BaseException) -> None:
        """Note that ``error`` is leaving the module of ``call``, whose parameters are unsharded.

        It ends the forward if the module is the outermost one. Else, or if it is recomputed, the program may catch it.
        """

    def begin_forward(self, root: ObservedRoot, outermost: FSDPState) -> None:
        """Note that a forward of ``outermost`` is about to gather the first group."""

    def enter_forward(self, root: ObservedRoot, call: ForwardCall) -> None:
        """Note that the parameters of ``call`` are unsharded. Its module computes next."""

    def enter_call(self, root: ObservedRoot, call: ForwardCall) -> None:
        """Note that the module of ``call`` computes next, in forward or recomputed."""

    def enter_with_others(self, root: ObservedRoot, call: ForwardCall) -> None:
        """Note that the module of ``call`` computes next, with other tensors that were registered in place of ours."""

    def enter_backward(self, root: ObservedRoot, call: ForwardCall) -> None:
        """Note that a gradient has reached an output of ``call``. The root has not waited for its parameters yet."""

    def before_hook(self, root: ObservedRoot, hook: Hook, subject: FSDPState | ForwardCall) -> None:
        """Note that the root begins to work for ``hook`` of ``subject``, an FSDP state or a call."""

    def after_hook(self, root: ObservedRoot, hook: Hook, subject: FSDPState | ForwardCall) -> None:
        """Note that the root has done its work for ``hook`` of ``subject``."""

    def begin_run(self, root: ObservedRoot, state: FSDPState) -> None:
        """Note that a module of ``state`` begins to run, in forward or recomputed. Its parameters are gathered next."""

    def end_run(self, root: ObservedRoot, state: FSDPState) -> None:
        """Note that a module of ``state`` has run in forward. The last one's parameters are freed next."""

    def end_forward(self, root: ObservedRoot) -> None:
        """Note that the outermost module has run."""

    def end_backward(self, root: ObservedRoot) -> None:
        """Note that autograd has run a backward. Nothing that is left of it is reduced or freed yet."""

    def before_end(self, root: ObservedRoot, which: Pass) -> Sequence[Work]:
        """Note that the root has launched all of a pass. Return work for which it waits before the pass ends.

        A pass whose wait raises has not succeeded: :meth:`end_pass` is told so.
        """
        return ()

    def kept(self, root: ObservedRoot, state: FSDPState) -> None:
        """Note that the parameters of ``state`` stay unsharded after a backward."""

    def unsharded(self, root: ObservedRoot, state: FSDPState) -> None:
        """Note that the user has called ``unshard()`` of ``state``, which was sharded."""

    def reset(self, root: ObservedRoot) -> bool:
        """Prepare for ``reset_iter_state``. Return whether the ranks have met after a failed pass.

        They may have gathered different groups then.
        """
        return False

    def before_reshard(self, root: ObservedRoot, state: FSDPState) -> None:
        """Note that the parameters of ``state`` are about to be freed outside of passes, if they are unsharded."""

    def have_met(self, root: ObservedRoot) -> None:
        """Note that the ranks have met in ``reset_iter_state``, and that the root is idle."""

    def after_reset(self, root: ObservedRoot) -> None:
        """Note that the root is idle after ``reset_iter_state``.

        An observer that may raise is first in the list, so that all others are told before.
        """


_OF_ROOTS = tuple(name for name in vars(Observer) if not name.startswith("_"))
_OF_ROOTS = _OF_ROOTS[_OF_ROOTS.index("for_root") + 1 :]
_ENDS = {"end_pass", "after_hook", "end_run", "end_forward", "end_backward", "before_end"}
_ENDS |= {"kept", "unsharded", "have_met", "after_reset"}
"""The events of roots of which the last observer is told first."""

Bound = tuple[Callable[..., PyTree], ...]


class Observers:
    """The observers of one root, and by event the methods that they override."""

    __slots__ = ("attached", *_OF_ROOTS)

    if TYPE_CHECKING:

        def __getattr__(self, event: str) -> Bound: ...

    def __init__(self, root: ObservedRoot, observers: Sequence[Observer]) -> None:
        self.attached: list[Observer] = []
        self._bind()
        for observer in observers:
            self.add(observer.for_root(root))

    def add(self, observer: Observer | None) -> None:
        """Tell ``observer`` of the events from now on."""
        if observer is not None and observer not in self.attached:
            self.attached.append(observer)
            self._bind()

    def remove(self, observer: Observer | None) -> None:
        """Tell ``observer`` of no further event."""
        if observer in self.attached:
            self.attached.remove(observer)
            self._bind()

    def _bind(self) -> None:
        for event in _OF_ROOTS:
            default, attached = getattr(Observer, event), self.attached[:: -1 if event in _ENDS else 1]
            told = (observer for observer in attached if getattr(type(observer), event) is not default)
            setattr(self, event, tuple(getattr(observer, event) for observer in told))


Hooked: TypeAlias = Callable[..., PyTree]
HOOK_WRAPPERS: list[Callable[[Hooked], Hooked]] = []
"""Functions from a hook around the forward of modules to what is registered in its place, innermost first."""

HOOK_FRAMES: set[CodeType] = set()
"""The code of wrappers whose frames are between a hook and its caller."""

CLASS_MEMBERS: list[Callable[[type[nn.Module]], Mapping[str, Callable[..., object]]]] = []
"""Functions from a class of modules to further members of its sharded subclass."""

OBSERVERS: list[Observer] = []
"""The observers of all roots that are assembled from now on."""


# -- The context of the caller, which hooks leave: autocast, dispatch modes, and transforms of torch.func

LEFT_CONTEXTS: list[Callable[[], AbstractContextManager[None]]] = []
"""Leave contexts of other packages, each of which has a mode of torch: nothing is left if there is no mode."""

P = ParamSpec("P")
R = TypeVar("R")

_C: Any = torch._C
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
function_modes: Callable[[], int] = _C._len_torch_function_stack
in_transform: Callable[[], bool] = _C._are_functorch_transforms_active
in_autocast: Callable[[], bool] = _C._is_any_autocast_enabled


def runs_outside(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which runs outside of the caller's context."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with outside_callers_context():
            return function(*args, **kwargs)

    return run


def runs_unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, a check of the library, which no mode of the caller or of torch's tools sees."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as left:
            if dispatch_modes():
                _leave_dispatch_modes(left, lambda kind: bool(kind.is_infra_mode()))
            return function(*args, **kwargs)

    return run


@contextmanager
def outside_callers_context() -> Iterator[None]:
    """Leave the caller's context, in this thread, until the end of the block."""
    with ExitStack() as left:
        # Contexts of other packages, then of torch.func, autocast, dispatch modes and function modes.
        for leave in LEFT_CONTEXTS if dispatch_modes() or function_modes() else ():
            left.enter_context(leave())
        if in_transform():
            left.enter_context(_C._DisableFuncTorch())
        if in_autocast():
            left.enter_context(_C._DisableAutocast())
        if dispatch_modes():
            _leave_dispatch_modes(left, _stays)
        for _ in range(function_modes()):
            left.callback(_C._push_on_torch_function_stack, _C._pop_torch_function_stack())
        yield


def _leave_dispatch_modes(left: ExitStack, stays: Callable[[Any], bool]) -> None:
    """Take the modes off the stack whose classes do not stay, until ``left`` ends."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    stay = [stays(type(mode)) for mode in modes]
    if all(stay):
        return
    # Pop all modes above the first that goes, and push again those that stay.
    first = stay.index(False)
    for _ in modes[first:]:
        left.callback(_push_mode, cast(Any, _pop_mode)())
    for mode in itertools.compress(modes[first:], stay[first:]):
        _push_mode(mode)
        left.callback(_pop_mode)


def _stays(kind: Any) -> bool:
    """Return whether modes of the class ``kind`` see what the library does."""
    places = [f"{base.__module__}." for base in kind.__mro__]
    is_ours = any(place.startswith(("torch.distributed.", "composable_fsdp.")) for place in places)
    return is_ours or kind.is_infra_mode() or bool(getattr(kind, "observes_sharding", False))
