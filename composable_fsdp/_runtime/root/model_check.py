"""The check that all ranks built the same model and started from the same values."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from composable_fsdp._comm.verify_ranks import gather_texts, ranks_text, verify_same
from composable_fsdp._consistency.order_check import LEVEL_VARIABLE, OrderCheck
from composable_fsdp._consistency.starting_values import (
    Candidate,
    Facts,
    differing_starts,
    equal_shards,
    host_bytes,
    sample,
    shard_details,
    start_details,
)
from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp._sharding.mesh import DataParallelAxes
from composable_fsdp.errors import DivergenceError, ParameterError

__all__ = ["check_models"]


def check_models(root: FSDPState, states: Mapping[str, FSDPState]) -> None:
    """Check that the model under ``root`` is the same on all ranks, with one small all-gather per mesh axis.

    Ranks of a mesh compare the groups sharded over that mesh, so ranks with other experts may differ. The message also
    has samples of the values. More is exchanged only if the samples show a mistake.

    Raises:
        DivergenceError: the models differ, or parameters that nothing has overwritten had different values when they
            were sharded. All ranks raise it with the same text.
        ParameterError: ranks hold the same random values as shards that should differ. All ranks raise it with the same
            text.
    """
    if root.order_check is OrderCheck.OFF:
        return
    every = dict.fromkeys([root.group.axes, *(c.axes for state in states.values() for c in state.group.process_groups)])
    for axes in every:
        parameters = {
            f"parameter {p.name!r} of group {name!r}": p
            for name, state in states.items()
            for p in state.group.parameters
            if p.sharding.axes == axes
        }
        _Comparison(root, states, axes, parameters).run()
    for state in states.values():
        for parameter in state.group.parameters:
            parameter.start = None


class _Comparison:
    """The comparison of the ``parameters`` that are sharded over ``axes``, by their names in errors."""

    def __init__(
        self,
        root: FSDPState,
        states: Mapping[str, FSDPState],
        axes: DataParallelAxes,
        parameters: Mapping[str, ShardedParameter],
    ) -> None:
        self._root, self._states, self._axes, self._parameters = root, states, axes, parameters
        self._communicators = (axes.shard, axes.replicate)
        self._subject = f"the model under {root.class_name}"
        self._candidates: list[Candidate] = []

    def run(self) -> None:
        lines = _model_lines(self._root, self._states, self._axes)
        found = verify_same(lines, self._communicators, self._axes.device, self._subject, self._facts)
        facts = {rank: Facts.parse(numbers) for rank, numbers in found.items()}
        if len({each.start for each in facts.values()}) > 1:
            self._check_starts()
        if Facts.any_equal_shards(facts):
            self._check_shards({rank: each.shard_rank for rank, each in facts.items()})

    def _facts(self) -> list[int]:
        self._candidates = _candidates(self._parameters)
        return Facts.of(self._candidates, self._axes.shard.rank).numbers

    def _gather_texts(self, text: str) -> dict[int, str]:
        return gather_texts(text, self._communicators, self._axes.device, self._subject)

    def _check_starts(self) -> None:
        unlike = differing_starts(
            self._gather_texts(start_details(self._candidates)), [c.name for c in self._candidates]
        )
        if not unlike:
            return
        name, ranks = next(iter(unlike.items()))
        raise DivergenceError(
            f"Ranks have started from different values: {name} was not the same on "
            f"{' and on '.join(map(ranks_text, ranks.values()))} when fully_shard cut it{_and_more(unlike)}. Each rank "
            "kept its own part, so the shards do not belong to one model. Pass sync_module_states=True to fully_shard, "
            "which takes the values of the first rank; or call torch.manual_seed with the same seed on every rank "
            "before the model is built; or call composable_fsdp.initialize(model, seed=...), or load a checkpoint, "
            "before the first forward."
        )

    def _check_shards(self, shard_ranks: Mapping[int, int]) -> None:
        shards = [
            (candidate, parameter.local_now, parameter.dim)
            for candidate, parameter in zip(self._candidates, self._parameters.values(), strict=True)
        ]
        equal = equal_shards(self._gather_texts(shard_details(shards)), shard_ranks)
        if not equal:
            return
        name, ranks = next(iter(equal.items()))
        raise ParameterError(
            f"{name} has the same random values on {ranks_text(ranks)}, which hold different shards of it"
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
    starts = [p.start for p in parameters.values()]
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
    return (
        f"composable_fsdp {_version()}, torch {torch.__version__}, mesh of ranks {axes.mesh.mesh.tolist()}, "
        f"order check {root.order_check.value!r}, max_merged_bytes {root.max_merged_bytes}, "
        f"max_unsharded_bytes {root.max_unsharded_bytes}, prefetch_limit {root.prefetch_limit}"
    )


def _model_lines(root: FSDPState, states: Mapping[str, FSDPState], axes: DataParallelAxes) -> Iterator[str]:
    yield _environment_text(root, axes)
    for name, state in states.items():
        parameters = [p for p in state.group.parameters if p.sharding.axes == axes]
        if not parameters and state.group.axes != axes:
            continue
        yield (
            f"group {name!r} of {state.class_name}: {_format(state.precision)}, {_format(state.group.offload)}, "
            f"{_format(state.reshard)}, unused parameters reduced: {state.unequal_use}"
        )
        for parameter in parameters:
            yield f"parameter {parameter.name!r} of group {name!r}: {parameter.description}"


def _format(policy: Any) -> str:
    """Return the name of ``policy`` with the fields that differ from their defaults."""
    values = [f"{f.name}={value}" for f in fields(policy) if (value := getattr(policy, f.name)) != f.default]
    return f"{type(policy).__name__}({', '.join(values)})"


def _version() -> str:
    try:
        return importlib.metadata.version("composable-fsdp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
