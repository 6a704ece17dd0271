"""Warnings of models that change after ``fully_shard``: parameters that are added, and another order of modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._consistency.order_check import OrderCheck
from composable_fsdp._core.group_plan import Pass
from composable_fsdp._core.seams import HookHandles, ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState, find_state
from composable_fsdp.errors import ExecutionOrderWarning, PlainParameterWarning

# -- Parameters added after ``fully_shard``, such as adapters, which no group shards or reduces
#
# ``fully_shard`` shards every parameter that is not in ``ignored_params``. So a parameter that is plain in the first
# forward, and was not there when the root was sharded, was added in between.


class PlainParameters(Observer):
    """Remembers which parameters were plain when ``fully_shard`` was called, and warns of others. Copies have none."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[FSDPState, WeakKeyDictionary[nn.Module, set[str]]] = WeakKeyDictionary()
        """The attributes of plain parameters, by state and module."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        places = self._known[state] = WeakKeyDictionary()
        for _, owner, attribute, _ in _plain(state.modules):
            places.setdefault(owner, set()).add(attribute)

    def before_assembly(self, root: FSDPState, states: Mapping[str, FSDPState]) -> None:
        """Warn of plain trainable parameters that were added below ``root`` after it was sharded.

        Warns:
            PlainParameterWarning: there are such parameters.
        """
        known = self._known.get(root)
        if known is None or root.group.axes.num_ranks == 1:
            return
        unmanaged = [
            f"{path}.{attribute}" if path else attribute
            for path, owner, attribute, parameter in _plain(root.modules)
            if parameter.requires_grad and attribute not in known.get(owner, ())
        ]
        if unmanaged:
            warnings.warn(
                f"{len(unmanaged)} parameters were added to {root.class_name} after fully_shard, such as "
                f"{unmanaged[0]!r}. They are plain and trainable, and nobody averages their gradients, so that copies "
                "drift apart. Add them before fully_shard; if they are reduced otherwise, filter this warning.",
                PlainParameterWarning,
                stacklevel=2,
            )


def _plain(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield module path, module, attribute and parameter of each plain parameter."""
    named = [each for top in modules for each in top.named_modules()]
    states = {state for _, owner in named if (state := find_state(owner)) is not None}
    groups = {each.group for state in states for each in (state, *state.owner_states)}
    held = {(id(owner), attribute) for group in groups for p in group.parameters for owner, attribute in p.owners}
    for path, owner in named:
        for attribute, parameter in owner._parameters.items():
            if isinstance(parameter, DTensor | None) or (id(owner), attribute) in held:
                continue
            yield path, owner, attribute, parameter


# -- The order of modules of a rank, compared with that of its first iteration
#
# ``_consistency/order_check.py`` compares the order between ranks.


class ForwardOrder(Observer):
    """The order of post-forwards in the first forward that led to a backward."""

    def __init__(self) -> None:
        self._first: tuple[str, ...] = ()
        self._has_warned = False

    def for_root(self, root: ObservedRoot) -> Observer:
        return ForwardOrder()

    def end_pass(self, root: ObservedRoot, which: Pass, succeeded: bool) -> None:
        """Compare the order of a completed forward with the first one.

        Warns:
            ExecutionOrderWarning: they differ. It is warned once.
        """
        if self._has_warned or not succeeded or which is not Pass.FORWARD:
            return
        if root.planner.record.events[-1].group != root.root_state.name:  # a module below the root ran by itself
            return
        if root.root_state.options.of_plugins.get("order check") is OrderCheck.OFF:
            return
        order = tuple(root.planner.record.ended)
        self._first = self._first or order
        if not order or order == self._first:
            return
        self._has_warned = True
        rank = dist.get_rank() if dist.is_initialized() else 0
        pairs = enumerate(zip_longest(self._first, order, fillvalue="the end of forward"))
        place, (then, now) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {rank}: number {place + 1} was "
            f"{then} and is {now} now. The groups prefetched were not the next ones, which costs time. "
            'model.set_order_check("off") silences this.',
            ExecutionOrderWarning,
            stacklevel=2,
        )
