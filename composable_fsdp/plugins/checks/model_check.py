"""The check that all ranks built the same model and started from the same values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch

from composable_fsdp._consistency.order_check import LEVEL_VARIABLE, OrderCheck
from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp._consistency.starting_values import (
    Candidate,
    Facts,
    Start,
    any_equal_shards,
    differing_starts,
    equal_shards,
    host_bytes,
    sample,
    sample_start,
    shard_details,
    start_details,
)
from composable_fsdp._consistency.verify_ranks import SHOWN_RANKS, gather_texts, verify_same
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.params import ShardedParameter, local_part
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState, state_of_parameter
from composable_fsdp.errors import DivergenceError, ParameterError

__all__ = ["ModelCheck"]

_starts: WeakKeyDictionary[ShardedParameter, Start] = WeakKeyDictionary()
"""Samples of the original values, until they are compared."""


class ModelCheck(Observer):
    """Compares the models of all ranks before the first collective."""

    def given_values(self, parameter: ShardedParameter, full: torch.Tensor) -> None:
        state = state_of_parameter(parameter)
        is_checked = state is not None and state.options.of_plugins.get("order check") is not OrderCheck.OFF
        if not is_checked or parameter.sharding.axes.num_ranks == 1:
            return
        start = sample_start(local_part(full), parameter.local_now)
        if start is not None:
            _starts[parameter] = start

    def before_first_collective(self, root: ObservedRoot) -> None:
        _check_models(root.root_state, root.states)


def _check_models(root: FSDPState, states: Mapping[str, FSDPState]) -> None:
    """Check that the model under ``root`` is the same on all ranks, with one small all-gather per mesh axis.

    Ranks of a mesh compare the groups sharded over that mesh, so ranks with other experts may differ. The message also
    has samples of the values. More is exchanged only if the samples show a mistake.

    Raises:
        DivergenceError: the models differ, or parameters that nothing has overwritten had different values when they
            were sharded. All ranks raise it with the same text.
        ParameterError: ranks hold the same random values as shards that should differ. All ranks raise it with the same
            text.
    """
    if root.options.of_plugins.get("order check") is OrderCheck.OFF:
        return
    every = dict.fromkeys([root.group.axes, *(c.axes for state in states.values() for c in state.group.process_groups)])
    for axes in every:
        parameters = {
            f"parameter {p.name!r} of group {name!r}": p
            for name, state in states.items()
            for p in state.group.parameters
            if p.sharding.axes == axes
        }
        _check_axes(root, states, axes, parameters)
    for state in states.values():
        for parameter in state.group.parameters:
            _starts.pop(parameter, None)


def _check_axes(
    root: FSDPState,
    states: Mapping[str, FSDPState],
    axes: DataParallelAxes,
    parameters: Mapping[str, ShardedParameter],
) -> None:
    """Check the ``parameters``, by their names in errors, that are sharded over ``axes``."""
    ranks = (axes.shard, axes.replicate), axes.device, f"the model under {root.class_name}"
    candidates: list[Candidate] = []

    def own_facts() -> list[int]:
        candidates.extend(_candidates(parameters))
        start, shard_rank, sketch = Facts.of(candidates, axes.shard.rank)
        return [start, shard_rank, *sketch]

    numbers = verify_same(_model_lines(root, states, axes), *ranks, own_facts)
    facts = {rank: Facts(start, shard, sketch) for rank, (start, shard, *sketch) in numbers.items()}
    if len({each.start for each in facts.values()}) > 1:
        names = [candidate.name for candidate in candidates]
        _refuse_starts(differing_starts(gather_texts(start_details(candidates), *ranks), names))
    if any_equal_shards(facts.values()):
        shards = [(c, p.local_now, p.dim) for c, p in zip(candidates, parameters.values(), strict=True)]
        details = gather_texts(shard_details(shards), *ranks)
        _refuse_shards(equal_shards(details, {rank: each.shard_rank for rank, each in facts.items()}))


def _refuse_starts(unlike: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """Raise if there are parameters whose initial values differed."""
    if not unlike:
        return
    name, found = next(iter(unlike.items()))
    ranks = " and on ".join(ranks_text(each, SHOWN_RANKS) for each in found.values())
    raise DivergenceError(
        f"Ranks have started from different values: {name} was not the same on {ranks} when fully_shard cut it"
        f"{_and_more(unlike)}. Each rank kept its own part, so the shards do not belong to one model. Pass "
        "sync_module_states=True to fully_shard, which takes the values of the first rank; or call torch.manual_seed "
        "with the same seed on every rank before the model is built; or call composable_fsdp.initialize(model, "
        "seed=...), or load a checkpoint, before the first forward."
    )


def _refuse_shards(equal: Mapping[str, Sequence[int]]) -> None:
    """Raise if there are parameters of which different shards are equal."""
    if not equal:
        return
    name, ranks = next(iter(equal.items()))
    raise ParameterError(
        f"{name} has the same random values on {ranks_text(ranks, SHOWN_RANKS)}, which hold different shards of it"
        f"{_and_more(equal)}. A random operation, such as reset_parameters(), has run on the shards with the same "
        "seed on every rank. Call composable_fsdp.initialize(model, seed=...) in its place, which gives the values "
        "of the unsharded model, or enclose it in composable_fsdp.sharded_rng(model, seed). If the values are "
        f"meant to repeat, call set_order_check('off') on the root, or set {LEVEL_VARIABLE}=off."
    )


def _and_more(found: Mapping[str, object]) -> str:
    return f", and so {len(found) - 1} other parameters" if len(found) > 1 else ""


def _candidates(parameters: Mapping[str, ShardedParameter]) -> list[Candidate]:
    """Return what is compared of each parameter. One copy brings all samples to the host."""
    shards = [p.local_now for p in parameters.values()]
    now = [sample(shard) for shard in shards]
    starts = [_starts.get(p) for p in parameters.values()]
    present = [each for start, values in zip(starts, now, strict=True) for each in (*(start or ()), values)]
    data = iter(host_bytes([each for each in present if each is not None]))
    return [
        Candidate(
            name,
            tuple(shard.shape),
            shard.dtype.itemsize,
            shard.dtype.is_floating_point,
            whole=None if start is None else next(data),
            shard_then=None if start is None else next(data),
            shard=None if values is None else next(data),
        )
        for name, shard, start, values in zip(parameters, shards, starts, now, strict=True)
    ]


def _environment_text(root: FSDPState, axes: DataParallelAxes) -> str:
    order_check = str(root.options.of_plugins.get("order check"))
    return (
        f"mesh of ranks {axes.mesh.mesh.tolist()}, "
        f"order check {order_check!r}, max_fused_bytes {root.options.max_fused_bytes}, "
        f"max_unsharded_bytes {root.options.max_unsharded_bytes}, prefetch_limit {root.options.prefetch_limit}, "
        f"deterministic algorithms {torch.are_deterministic_algorithms_enabled()}"
    )


def _model_lines(root: FSDPState, states: Mapping[str, FSDPState], axes: DataParallelAxes) -> Iterator[str]:
    yield _environment_text(root, axes)
    for name, state in states.items():
        parameters = [p for p in state.group.parameters if p.sharding.axes == axes]
        if not parameters and state.group.axes != axes:
            continue
        chosen = f"{_format(state.options.precision)}, {_format(state.options.reshard)}"
        reduces_unused = state.group.process_groups[0].reduces_unused
        yield f"group {name!r} of {state.class_name}: {chosen}, unused parameters reduced: {reduces_unused}"
        for parameter in parameters:
            yield f"parameter {parameter.name!r} of group {name!r}: {parameter.description}"


def _format(policy: Any) -> str:
    """Return the name of ``policy`` with the fields that differ from their defaults."""
    values = [f"{f.name}={value}" for f in fields(policy) if (value := getattr(policy, f.name)) != f.default]
    return f"{type(policy).__name__}({', '.join(values)})"
