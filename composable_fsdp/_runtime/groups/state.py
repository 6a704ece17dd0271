"""What one ``fully_shard`` call made: modules, their group, and the choices that can still be changed.

Ownership, so that a dropped model is freed by reference counts alone: a module owns its unit, the modules of a root own
its iteration, the iteration owns the units below it, a unit owns its group and its lenders. Every reference in the
other direction is weak: from a unit to its modules, its iteration, its borrowers and the units that it prefetches, and
from a parameter to the modules on which it is registered.
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
from composable_fsdp._runtime.schedule.policy import PREFETCH_LIMIT, ForwardRecord
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
    "holding_state",
    "state_of",
]

_STATE_ATTRIBUTE = "_composable_fsdp_state"
ITERATION_ATTRIBUTE = "_composable_fsdp_iteration"
"""Of the modules of a root. A copy of such a module has no iteration until it runs."""
PlainPlaces = WeakKeyDictionary[nn.Module, set[str]]
"""Attributes of modules."""
MERGED_BYTES = 1 << 20
"""Of full parameters of neighbouring small groups that travel together."""


class Accumulation(Enum):
    """What becomes of the gradients of one microbatch."""

    REDUCE = "reduce"
    """Reduced, and set on the sharded parameters or added to what is there."""
    SHARDED = "sharded"
    """Reduced over the shard axis, and summed there in the reduce dtype until a backward under REDUCE."""
    UNSHARDED = "unsharded"
    """Summed in full on every rank, in the reduce dtype, without communication, until a backward under another."""


_CHOICES = (
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


_NO_RECORD = ForwardRecord()
"""Of rounds to which no backward comes. Nothing is noted in it."""


class Round:
    """One run of a unit in forward, from the first of its modules that begins to the last that ends.

    Kept alive by the graph. ``seen``: what the parameters were, where that is compared in backward.
    ``awaited`` counts the module calls whose inputs' gradients backward has not reached yet.
    ``ends_unseen``: the inputs of some call need no gradient, so that nothing shows when backward is done with it.
    """

    __slots__ = ("awaited", "ends_unseen", "position", "record", "remaining", "seen")

    def __init__(self, module_ids: Collection[int]) -> None:
        self.remaining = set(module_ids)
        self.record = _NO_RECORD
        self.position = -1
        self.awaited = 0
        self.ends_unseen = False
        self.seen: Seen | None = None


class FSDPState:
    """The modules of one call, in the order given, and their group.

    The public fields are choices, read when they are needed: most count at once, those of a root from the next forward,
    ``reductions_in_flight`` from the next backward.

    Args:
        modules: the modules whose forwards and backwards bring the group in and out of memory; none within another.
        group: the parameters that the call took.
        reshard: what happens after forward.
        precision: dtypes of inputs, parameters, reduction and outputs.
        lenders: units that hold parameters which these modules use too, and so are unsharded along with this one.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: ParameterGroup,
        reshard: Reshard,
        precision: MixedPrecisionPolicy,
        lenders: Sequence[FSDPState] = (),
    ) -> None:
        self._modules = tuple(map(ref, modules))
        self.module_ids = frozenset(map(id, modules))
        self.has_several_modules = len(modules) > 1
        self.class_name = ", ".join(type(module).__name__.removeprefix("FSDP") for module in modules)
        """The modules' own classes, for messages."""
        self.group = group
        self.precision = precision
        self.reshard = reshard
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.accumulation = Accumulation.REDUCE
        self.all_reduce = True
        self.reductions_in_flight: int | None = None
        self.max_unsharded_bytes: int | None = None
        """Of a root: up to which groups are gathered ahead of their turn."""
        self.prefetch_limit = PREFETCH_LIMIT
        """Of a root: how many groups are gathered ahead of their turn."""
        self.order_check = order_check_from()
        """Of a root: how much ranks compare before they begin."""
        self.max_merged_bytes = MERGED_BYTES
        """Of a root: of groups that are gathered, and reduced, together."""
        self.version_check: VersionCheck | None = VersionCheck(group, reads_shards=False)
        """Compares parameters in backward with those of the forward."""
        self.forward_prefetch: Sequence[ref[FSDPState]] | None = None
        """Units to gather in forward ahead of their turn, where the user chose them."""
        self.backward_prefetch: Sequence[ref[FSDPState]] | None = None
        """The same in backward."""
        self.lenders = tuple(lenders)
        self.borrowing: list[ref[FSDPState]] = []
        """Units whose lender it is."""
        for lender in self.lenders:
            lender._lend_to(self)
        self.has_nested_states = any(find_state(m) is not None for module in modules for m in module.modules())
        self.calls_under_way: list[Any] = []
        """Forward calls that have begun and not ended, innermost last; the hooks know what they are."""
        self.round: Round | None = None
        """The run of its modules in the forward that is under way."""
        self.open_calls = 0
        """Forward calls whose inputs' gradients this backward has not yet reached."""
        self.entered_backward = -1
        """The last backward that reached the unit through an output that its hooks saw."""
        self.runs = 0
        """Runs in forward to which a backward may come: in one forward, or in several before one backward."""
        self.plain_places: PlainPlaces | None = None
        """Where parameters were plain, and stayed so, when ``fully_shard`` made the unit. Not known of a copy."""
        self.kept_version: int | None = None
        """The group's version when it was last left unsharded between passes."""
        self.kept_steps: object = None
        """The optimizer steps that its full parameters then showed."""
        self.kept_frozen = False
        """Whether it was left so for good, with nothing in it that an optimizer could change."""
        self.client_pre_backward: Callable[..., None] | None = None
        self.client_post_backward: Callable[..., None] | None = None
        """What a client put around what the iteration does when backward reaches the unit, and with its gradients."""
        self._iteration: Callable[[], Any] = _no_iteration
        for module in modules:
            self.attach(module)
        for parameter in group.parameters:
            parameter.held_by = ref(self)

    def borrow_from(self, lender: FSDPState) -> None:
        """``lender`` holds a parameter that these modules use too."""
        if lender not in self.lenders:
            self.lenders = (*self.lenders, lender)
            lender._lend_to(self)

    def _lend_to(self, borrower: FSDPState) -> None:
        self.borrowing.append(ref(borrower, self.borrowing.remove))

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """In the order given, without those that were dropped since."""
        return tuple(module for known in self._modules if (module := known()) is not None)

    @property
    def iteration(self) -> Any:
        """The ``Iteration`` it takes part in, once its root has been assembled and until the root is dropped.

        ``assemble`` knows the type.
        """
        return self._iteration()

    @iteration.setter
    def iteration(self, iteration: Any) -> None:
        self._iteration = _no_iteration if iteration is None else ref(iteration)

    def deliver_before_changes(self) -> None:
        """Ends the reductions in flight of parameters that were frozen or thawed since, before the group follows."""
        iteration = self.iteration
        if iteration is not None:
            iteration.deliver_before_changes()

    def note_kept(self, steps: object) -> None:
        """The group is left unsharded between passes. ``steps``: of optimizers, when it was gathered or earlier."""
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

    def follow_choices(self, other: FSDPState) -> None:
        """Takes over what was chosen for ``other``, of which this is a copy; not what it prefetches."""
        for choice in _CHOICES:
            setattr(self, choice, getattr(other, choice))

    def attach(self, module: nn.Module) -> None:
        """Makes the unit that of ``module``."""
        vars(module)[_STATE_ATTRIBUTE] = self

    def registered_parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter object that this unit may have registered on its modules."""
        for parameter in self.group.parameters:
            yield parameter.sharded
            yield parameter.unsharded

    @property
    def is_running(self) -> bool:
        """Whether a forward of one of its modules is under way."""
        return bool(self.calls_under_way) or self.round is not None

    @property
    def is_lent(self) -> bool:
        """Whether the forward of another unit that is under way uses parameters of this one."""
        return bool(self.borrowing) and any(borrower.is_running for borrower in alive(self.borrowing))

    @property
    def keeps_partial(self) -> bool:
        """Whether a reduction now ends at the shard axis."""
        if self.all_reduce:
            return self.accumulation is Accumulation.SHARDED
        replicates = any(pgs.replicate.size > 1 for pgs in self.group.process_groups)
        return replicates or self.accumulation is Accumulation.SHARDED

    @property
    def sends_batches(self) -> bool:
        """Whether gradients go in several batches, each as soon as it is complete.

        Not where other units' collectives come in between: a rank that does not use the batch sends it at the end. Nor
        what travels together with others.
        """
        plan = self.group.tensors.plan
        if not plan.in_batches or plan.is_small:
            return False
        if self.has_nested_states or self.lenders or self.borrowing or self.has_several_modules:
            return False
        return self.accumulation is Accumulation.REDUCE and not self.keeps_partial

    @property
    def may_have_company(self) -> bool:
        """Whether its parameters may be gathered, and its gradients reduced, together with those of other units."""
        shares = self.lenders or self.borrowing
        chosen = self.forward_prefetch is not None or self.backward_prefetch is not None
        if shares or chosen or self.reshard.kind is ReshardKind.SMALLER:
            return False
        return not any(pgs.is_custom for pgs in self.group.process_groups)

    @property
    def unequal_use(self) -> bool:
        """Whether ranks may use different parts of the group, or skip the unit, in the same step."""
        return self.group.process_groups[0].unequal_use

    @property
    def frees_with_last_gradient(self) -> bool:
        """Whether nothing in the modules' own backward can still need the parameters once all have their gradients."""
        plan = self.group.plan
        return not self.borrowing and plan.num_trainable == len(plan.specs)


class ModuleReference:
    """A weak reference to the module that owns whoever has it. In a deep copy it refers to the copied module."""

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
    """In place of a reference to an iteration."""


def alive(references: Sequence[ref[FSDPState]]) -> list[FSDPState]:
    """Those of the units that were not dropped."""
    return [state for known in references if (state := known()) is not None]


def holding_state(parameter: object) -> FSDPState | None:
    """The unit that holds ``parameter``, a sharded parameter or the tensor of either of its forms, if there is one."""
    found = parameter if isinstance(parameter, ShardedParameter) else find_parameter(parameter)
    return found.held_by() if found is not None and found.held_by is not None else None


def find_state(module: nn.Module) -> FSDPState | None:
    """The unit that a ``fully_shard`` call on ``module`` made, if there was one."""
    state = vars(module).get(_STATE_ATTRIBUTE)
    return state if isinstance(state, FSDPState) else None


def state_of(module: nn.Module) -> FSDPState:
    """The unit of ``module``, which must have one."""
    state = find_state(module)
    if state is None:
        raise LifecycleError(f"{type(module).__name__} has not been sharded: call fully_shard on it first.")
    return state
