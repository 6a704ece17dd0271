"""The result of one ``fully_shard`` call: modules, their parameter group, and settings.

Reference counts alone free a dropped model. A module owns its FSDP state, the modules of a root own its iteration, the
iteration owns the states below it, and a state owns its group and its lenders. Other references are weak: from a state
to its modules, its iteration, its borrowers and the states that it prefetches, and from a parameter to its modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from composable_fsdp._consistency.order_check import order_check_from
from composable_fsdp._runtime.groups.param_group import ParameterGroup
from composable_fsdp._runtime.groups.version_check import Seen, VersionCheck
from composable_fsdp._runtime.params.sharded_param import ShardedParameter, find_parameter
from composable_fsdp._runtime.schedule.forward_record import ForwardRecord
from composable_fsdp._runtime.schedule.passes import PREFETCH_LIMIT
from composable_fsdp.errors import LifecycleError
from composable_fsdp.policies import MixedPrecisionPolicy, Reshard, ReshardKind

__all__ = [
    "ITERATION_ATTRIBUTE",
    "Accumulation",
    "FSDPState",
    "ModuleReference",
    "PlainPlaces",
    "Round",
    "alive",
    "find_state",
    "state_of",
    "state_of_parameter",
]

_STATE_ATTRIBUTE = "_composable_fsdp_state"
ITERATION_ATTRIBUTE = "_composable_fsdp_iteration"
"""The attribute of a root's modules with its iteration. A copied module has none until it runs."""
PlainPlaces = WeakKeyDictionary[nn.Module, set[str]]
"""The attributes of plain parameters, by module."""
MERGED_BYTES = 1 << 20
"""The default for the full parameters of neighbouring small groups that share a message, in bytes."""


class Accumulation(Enum):
    """The handling of one microbatch's gradients."""

    REDUCE = "reduce"
    """Reduce, and set or add to the sharded gradients."""
    SHARDED = "sharded"
    """Reduce over the shard axis, and sum in the reduce dtype until a backward with REDUCE."""
    UNSHARDED = "unsharded"
    """Sum the full gradients in the reduce dtype, without communication, until a backward with another value."""


_SETTINGS = (
    "accumulation",
    "all_reduce",
    "has_nested_states",
    "max_merged_bytes",
    "max_unsharded_bytes",
    "order_check",
    "prefetch_limit",
    "reductions_in_flight",
    "reshard_after_backward",
    "unshard_in_backward",
)


class _Setting:
    """A setting of an FSDP state; each assignment increments its ``settings_version``. Reads are plain attributes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, state: FSDPState, value: object) -> None:
        vars(state)[self._name] = value
        state.settings_version += 1


def _setting() -> Any:
    """Return a :class:`_Setting`, typed so that an annotation of the attribute holds."""
    return _Setting()


_NO_RECORD = ForwardRecord()
"""The shared record of forwards without a backward. Nothing is written to it."""


class Round:
    """One run of an FSDP state in forward, from the first of its modules that begins to the last that ends.

    The autograd graph keeps it alive. ``seen`` has the versions of the parameters, if backward checks them. ``awaited``
    counts the module calls whose input gradients are not ready yet. ``ends_unseen`` is True if a call had no input that
    needs a gradient, so that no hook shows the end of its backward.
    """

    __slots__ = ("after", "awaited", "ends_unseen", "is_recorded", "position", "record", "remaining", "seen")

    def __init__(self, module_ids: Collection[int], after: Any = None) -> None:
        self.remaining = set(module_ids)
        self.after = after
        """The scheduled actions for the post-forward event, or ``None`` for eager ones."""
        self.record = _NO_RECORD
        self.position = -1
        self.is_recorded = False
        """True if the end of the run is in the record of the forward."""
        self.awaited = 0
        self.ends_unseen = False
        self.seen: Seen | None = None


class FSDPState:
    """The modules of one ``fully_shard`` call, in the order given, and their parameter group.

    The public fields are settings. Most take effect at once, those of a root in the next forward, and
    ``reductions_in_flight`` in the next backward.

    Args:
        modules: the modules that unshard and reshard the group; none contains another.
        group: the parameters of the call.
        reshard: what to do after forward.
        precision: the dtypes of inputs, parameters, reduction and outputs.
        lenders: the states whose groups own parameters that these modules use too. They are unsharded together.
    """

    reshard: Reshard = _setting()
    reshard_after_backward: bool = _setting()
    unshard_in_backward: bool = _setting()
    accumulation: Accumulation = _setting()
    all_reduce: bool = _setting()
    reductions_in_flight: int | None = _setting()
    max_unsharded_bytes: int | None = _setting()
    prefetch_limit: int = _setting()
    max_merged_bytes: int = _setting()
    forward_prefetch: Sequence[ref[FSDPState]] | None = _setting()
    backward_prefetch: Sequence[ref[FSDPState]] | None = _setting()
    lenders: tuple[FSDPState, ...] = _setting()

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: ParameterGroup,
        reshard: Reshard,
        precision: MixedPrecisionPolicy,
        lenders: Sequence[FSDPState] = (),
    ) -> None:
        self.settings_version = 0
        """The number of changes of settings; schedules depend on it."""
        self._modules = tuple(map(ref, modules))
        self.module_ids = frozenset(map(id, modules))
        self.has_several_modules = len(modules) > 1
        self.class_name = ", ".join(type(module).__name__.removeprefix("FSDP") for module in modules)
        """The original class names of the modules, for errors."""
        self.group = group
        self.precision = precision
        self.reshard = reshard
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.accumulation = Accumulation.REDUCE
        self.all_reduce = True
        self.reductions_in_flight = None
        self.max_unsharded_bytes = None
        """For a root: the bound for prefetching, in bytes of unsharded parameters."""
        self.prefetch_limit = PREFETCH_LIMIT
        """For a root: the number of groups to prefetch."""
        self.order_check = order_check_from()
        """For a root: the checks between ranks before collectives."""
        self.max_merged_bytes = MERGED_BYTES
        """For a root: the size up to which neighbouring small groups share an all-gather or a reduction."""
        self.version_check: VersionCheck | None = VersionCheck(group, reads_shards=False)
        """The comparison of the parameters in backward with those in forward, or ``None`` if it is off."""
        self.forward_prefetch = None
        """The states that the user chose to prefetch in forward."""
        self.backward_prefetch = None
        """The states that the user chose to prefetch in backward."""
        self.lenders = tuple(lenders)
        self.borrowing: list[ref[FSDPState]] = []
        """The states that have this one as a lender."""
        for lender in self.lenders:
            lender._lend_to(self)
        self.has_nested_states = any(find_state(m) is not None for module in modules for m in module.modules())
        self.calls_under_way: list[Any] = []
        """The open forward calls, innermost last. The hooks define their type."""
        self.round: Round | None = None
        """The current forward run of the modules."""
        self.open_calls = 0
        """The number of forward calls whose input gradients this backward has not reached."""
        self.entered_backward = -1
        """The last backward that reached this state through an output with a hook."""
        self.runs = 0
        """The number of forward runs that a backward may still reach."""
        self.plain_places: PlainPlaces | None = None
        """The plain parameters left out by ``fully_shard``. ``None`` for a copy."""
        self.kept_version: int | None = None
        """The version of the group when it was last kept unsharded between passes."""
        self.kept_steps: object = None
        """The optimizer steps that those unsharded parameters include."""
        self.kept_frozen = False
        """True if the group stays unsharded and has no parameter that an optimizer could change."""
        self.client_pre_backward: Callable[..., None] | None = None
        self.client_post_backward: Callable[..., None] | None = None
        """Wrappers that a client put around the iteration's pre-backward and post-backward."""
        self._iteration: Callable[[], Any] = _no_iteration
        for module in modules:
            self.attach(module)
        for parameter in group.parameters:
            parameter.state_ref = ref(self)

    def borrow_from(self, lender: FSDPState) -> None:
        """Add ``lender``, whose group owns a parameter that these modules use too."""
        if lender not in self.lenders:
            self.lenders = (*self.lenders, lender)
            lender._lend_to(self)

    def _lend_to(self, borrower: FSDPState) -> None:
        self.borrowing.append(ref(borrower, self.borrowing.remove))
        self.settings_version += 1

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules in the order given, without those that were garbage-collected."""
        return tuple(module for known in self._modules if (module := known()) is not None)

    @property
    def iteration(self) -> Any:
        """The ``Iteration`` of the root, or ``None`` before it is assembled and after the root is dropped.

        The type is that of ``assemble``, which this module cannot import.
        """
        return self._iteration()

    @iteration.setter
    def iteration(self, iteration: Any) -> None:
        self._iteration = _no_iteration if iteration is None else ref(iteration)

    def drain_before_changes(self) -> None:
        """Complete the reductions in flight of parameters whose ``requires_grad`` has changed."""
        iteration = self.iteration
        if iteration is not None:
            iteration.drain_before_changes()

    def note_kept(self, steps: object) -> None:
        """Record that the group stays unsharded. ``steps``: the optimizer steps at its all-gather, or earlier ones."""
        self.kept_version, self.kept_steps = self.group.tensors.version, steps
        self.kept_frozen = (
            not self.reshard_after_backward
            and not self.group.plan.num_trainable
            and all(parameter.sharded.grad is None for parameter in self.group.parameters)
        )

    def __repr__(self) -> str:
        return f"FSDPState({self.name!r}, {len(self.group.parameters)} parameters)"

    @property
    def name(self) -> str:
        return self.group.name

    def copy_settings(self, other: FSDPState) -> None:
        """Copy the settings of ``other``, of which this is a copy, except explicit prefetching."""
        for choice in _SETTINGS:
            setattr(self, choice, getattr(other, choice))

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
        return bool(self.calls_under_way) or self.round is not None

    @property
    def is_lent(self) -> bool:
        """True while a forward of another state uses parameters of this one."""
        return bool(self.borrowing) and any(borrower.is_running for borrower in alive(self.borrowing))

    @property
    def keeps_partial(self) -> bool:
        """True if a reduction now ends after the shard axis."""
        if self.all_reduce:
            return self.accumulation is Accumulation.SHARDED
        replicates = any(pgs.replicate.size > 1 for pgs in self.group.process_groups)
        return replicates or self.accumulation is Accumulation.SHARDED

    @property
    def sends_batches(self) -> bool:
        """True if each batch of gradients is reduced as soon as it is ready.

        False if collectives of other states could come in between, since a rank that does not use a batch reduces it at
        the end. Also False for small groups, which are fused with others.
        """
        plan = self.group.tensors.plan
        if not plan.in_batches or plan.is_small:
            return False
        if self.has_nested_states or self.lenders or self.borrowing or self.has_several_modules:
            return False
        return self.accumulation is Accumulation.REDUCE and not self.keeps_partial

    @property
    def can_be_fused(self) -> bool:
        """True if collectives of this group may be fused with those of other groups."""
        shares = self.lenders or self.borrowing
        chosen = self.forward_prefetch is not None or self.backward_prefetch is not None
        if shares or chosen or self.reshard.kind is ReshardKind.SMALLER:
            return False
        return not any(pgs.is_custom for pgs in self.group.process_groups)

    @property
    def unequal_use(self) -> bool:
        """True if ranks may use different parameters of the group, or skip the modules, in the same step."""
        return self.group.process_groups[0].unequal_use

    @property
    def frees_with_last_gradient(self) -> bool:
        """True if the modules' backward needs no parameter once all gradients are ready."""
        plan = self.group.plan
        return not self.borrowing and plan.num_trainable == len(plan.specs)


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


def _no_iteration() -> None:
    """Return ``None``, as a dead reference to an iteration would."""


def alive(references: Sequence[ref[FSDPState]]) -> list[FSDPState]:
    """Return the states that still exist."""
    return [state for known in references if (state := known()) is not None]


def state_of_parameter(parameter: object) -> FSDPState | None:
    """Return the state whose group owns ``parameter``, a ``ShardedParameter`` or either of its forms, or ``None``."""
    found = parameter if isinstance(parameter, ShardedParameter) else find_parameter(parameter)
    return found.state_ref() if found is not None and found.state_ref is not None else None


def find_state(module: nn.Module) -> FSDPState | None:
    """Return the state that ``fully_shard`` attached to ``module``, or ``None``."""
    state = vars(module).get(_STATE_ATTRIBUTE)
    return state if isinstance(state, FSDPState) else None


def state_of(module: nn.Module) -> FSDPState:
    """Return the state of ``module``, or raise a ``LifecycleError`` if it has none."""
    state = find_state(module)
    if state is None:
        raise LifecycleError(f"{type(module).__name__} has not been sharded: call fully_shard on it first.")
    return state
