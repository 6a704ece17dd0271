"""The check that all ranks built the same model and started from the same values.

Two mistakes raise no error but train a wrong model. If ranks built different values, they hold shards of different
models. If ranks ran the same random initialization with the same seed on their shards, they hold copies of one shard.

The message that compares models has a fixed size, so it has a summary of samples of the values. Details are exchanged
only if the summaries show a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from composable_fsdp._consistency.order_check import LEVEL_VARIABLE, OrderCheck
from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp._consistency.verify_ranks import gather_by_rank, verify_same
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.params import ShardedParameter, local_part
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import ROOT_OPTIONS, FSDPState
from composable_fsdp.errors import ConfigurationError, DivergenceError, ParameterError

SAMPLED = 64
"""The number of elements compared per tensor."""
_SLOTS = 32
_MIN_DISTINCT = 8
"""The number of distinct values from which a sample looks random. Tables of a few constants have fewer."""
_CHANGED, _ANY = "changed", "any"
"""Starting values of a shard that has changed since it was cut, and of one that does not show them."""

_starts: WeakKeyDictionary[ShardedParameter, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()
"""Samples of parameters and of this rank's shards, taken when the parameters were sharded, until they are compared."""


class Values(NamedTuple):
    """Facts about the values of one parameter, which ranks compare.

    Args:
        start: the digest of a sample of the full parameter when it was sharded, ``_CHANGED`` or ``_ANY``.
        varies: whether elements of the shard differ. Equal ones, or none, do not depend on the starting values.
        shard: the digest of a sample of the shard if a random number generator may have made it, else 0.
    """

    start: str
    varies: bool
    shard: int

    @property
    def shown_start(self) -> str:
        return self.start if self.varies else _ANY

    @staticmethod
    def of(name: str, local: torch.Tensor, shard: bytes, whole: bytes | None = None, then: bytes = b"") -> Values:
        """Return the values of a parameter from samples of its shard ``local``, and of the parameter and shard then."""
        elements = [shard[i : i + local.itemsize] for i in range(0, len(shard), local.itemsize)]
        distinct = len(set(elements))
        is_random = local.is_floating_point() and distinct >= max(_MIN_DISTINCT, len(elements) // 2)
        number = _digest(f"{name} {tuple(local.shape)}".encode(), shard) if is_random else 0
        start = _ANY if whole is None else f"{_digest(whole):x}" if shard == then else _CHANGED
        return Values(start, distinct > 1, number)


def _digest(*parts: bytes) -> int:
    return int.from_bytes(blake2b(b"\0".join(parts), digest_size=8).digest(), "little", signed=True)


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return up to ``SAMPLED`` elements spread over ``tensor``, 1-d, or ``None`` for subclasses and meta tensors."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
        return None
    values, count = tensor.detach(), tensor.numel()
    step = max(1, count // SAMPLED)
    step -= step > 1 and step % 2 == 0  # odd, because an even step would often sample one column only
    return values.reshape(-1)[::step][:SAMPLED].clone()


def _bytes(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().view(-1, 1).view(torch.uint8).cpu().numpy().tobytes()


def _values_of(name: str, parameter: ShardedParameter) -> Values:
    shard = parameter.local_now
    return Values.of(name, shard, _bytes(_sample(shard)), *map(_bytes, _starts.get(parameter, ())))


def _summary(names: Iterable[str], values: Sequence[Values], shard_rank: int) -> list[int]:
    """Return numbers in which ranks with the same start, and ranks with equal shards, agree, as many for every model.

    They are a digest of the starts, the rank's index on the shard axis, and the shards, hashed to slots by name.
    """
    slots = [0] * _SLOTS
    for name, each in zip(names, values, strict=True):
        slots[_digest(name.encode()) % _SLOTS] ^= each.shard
    return [_digest(*(each.start.encode() for each in values)), shard_rank, *slots]


def _ranks_by_value(values: Mapping[int, Sequence[str]], k: int) -> dict[str, list[int]]:
    """Return the ranks of each distinct ``k``-th value but ``_ANY``."""
    ranks: dict[str, list[int]] = {}
    for rank, own in sorted(values.items()):
        if own[k] != _ANY:
            ranks.setdefault(own[k], []).append(rank)
    return ranks


def differing_starts(starts: Mapping[int, Sequence[str]], names: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return parameters whose initial values differed between ranks, with the ranks of each value.

    A parameter that has changed since on any rank is skipped, because its initial values are overwritten.

    Args:
        starts: the starting values of each rank, one for each parameter.
        names: names of the parameters.
    """
    found = {name: _ranks_by_value(starts, k) for k, name in enumerate(names)}
    return {name: [*ranks.values()] for name, ranks in found.items() if len(ranks) > 1 and _CHANGED not in ranks}


def _shard_digest(values: Values, parameter: ShardedParameter) -> str:
    """Return the digest of all of a shard that seems to be random.

    Shards of one row, or whose first two rows are equal, are skipped. Repeated rows are intended, as for experts that
    are all initialized as copies of one layer.
    """
    shard, dim = parameter.local_now, parameter.dim
    if not values.shard or shard.size(dim) < 2 or torch.equal(shard.select(dim, 0), shard.select(dim, 1)):
        return _ANY
    return f"{tuple(shard.shape)} {_digest(_bytes(shard.detach())):x}"


def equal_shards(
    shards: Mapping[int, Sequence[str]], names: Sequence[str], shard_ranks: Mapping[int, int]
) -> dict[str, list[int]]:
    """Return parameters of which ranks with different shards hold equal values, and these ranks.

    A single such parameter among others that differ is considered a table that repeats itself, and skipped.
    """

    def hold_different_shards(ranks: Iterable[int]) -> bool:
        return len({shard_ranks[rank] for rank in ranks}) > 1

    holders = {name: [*_ranks_by_value(shards, k).values()] for k, name in enumerate(names)}
    compared = [name for name, ranks in holders.items() if hold_different_shards(chain(*ranks))]
    found = {n: same for n in compared for same in holders[n] if hold_different_shards(same)}
    return found if len(found) > 1 or len(found) == len(compared) else {}


class ModelCheck(Observer):
    """Compares the settings of groups, and the models of all ranks, before the first collective."""

    def given_values(self, parameter: ShardedParameter, full: torch.Tensor) -> None:
        if parameter.sharding.axes.num_ranks > 1:
            whole, shard = _sample(local_part(full)), _sample(parameter.local_now)
            if whole is not None and shard is not None:
                _starts[parameter] = whole, shard

    def before_first_collective(self, root: ObservedRoot) -> None:
        """Check that the model under ``root`` is the same on all ranks, with one small all-gather per mesh axis.

        Ranks of a mesh compare the groups sharded over that mesh, so ranks with other experts may differ. All ranks
        raise an error with the same text.

        Raises:
            ConfigurationError: a group has another value of a setting of roots than its root.
            DivergenceError: the models differ, or parameters that nothing has overwritten had different values when
                they were sharded.
            ParameterError: ranks hold the same random values as shards that should differ.
        """
        check_settings(root.root_state, root.states.values())
        if root.root_state.options.of_plugins.get("order check") is OrderCheck.OFF:
            return
        groups = {name: state.group for name, state in root.states.items()}
        used = (pgs.axes for group in groups.values() for pgs in group.process_groups)
        for axes in dict.fromkeys([root.root_state.group.axes, *used]):
            parameters = {
                f"parameter {p.name!r} of group {name!r}": p
                for name, group in groups.items()
                for p in group.parameters
                if p.sharding.axes == axes
            }
            _check_axes(root.root_state, root.states, axes, parameters)
        for group in groups.values():
            for parameter in group.parameters:
                _starts.pop(parameter, None)


def _check_axes(
    root: FSDPState, states: Mapping[str, FSDPState], axes: DataParallelAxes, parameters: Mapping[str, ShardedParameter]
) -> None:
    """Check the ``parameters``, by their names in errors, that are sharded over ``axes``."""
    communicators, names, values = (axes.shard, axes.replicate), list(parameters), list[Values]()

    def own_summary() -> list[int]:
        values.extend(_values_of(name, parameter) for name, parameter in parameters.items())
        return _summary(names, values, axes.shard.rank)

    lines, subject = _model_lines(root, states, axes), f"the model under {root.class_name}"
    summaries = verify_same(lines, communicators, axes.device, subject, own_summary)
    if len({start for start, *_ in summaries.values()}) > 1:
        unlike = differing_starts(gather_by_rank([each.shown_start for each in values], communicators), names)
        if unlike:
            name, found = next(iter(unlike.items()))
            unlike_ranks = " and on ".join(format_ranks(each) for each in found)
            raise DivergenceError(
                f"Ranks have started from different values: {name} was not the same on {unlike_ranks} when fully_shard "
                f"cut it{_and_more(unlike)}, so the shards do not belong to one model. Pass sync_module_states=True to "
                "fully_shard; or call torch.manual_seed with the same seed on every rank before the model is built; or "
                "composable_fsdp.initialize(model, seed=...), or load a checkpoint, before the first forward."
            )
    owners: dict[int, int] = {}  # of the shards in a slot
    numbers = [(number, shard_rank) for _, shard_rank, *slots in summaries.values() for number in slots if number]
    if any(owners.setdefault(number, shard_rank) != shard_rank for number, shard_rank in numbers):
        own = [_shard_digest(each, parameter) for each, parameter in zip(values, parameters.values(), strict=True)]
        shard_ranks = {rank: shard_rank for rank, (_, shard_rank, *_) in summaries.items()}
        equal = equal_shards(gather_by_rank(own, communicators), names, shard_ranks)
        if equal:
            name, equal_ranks = next(iter(equal.items()))
            raise ParameterError(
                f"{name} has the same random values on {format_ranks(equal_ranks)}, which hold different "
                f"shards of it{_and_more(equal)}. A random operation, such as reset_parameters(), has run on the "
                "shards with the same seed on every rank. Call composable_fsdp.initialize(model, seed=...) in its "
                "place, or enclose it in composable_fsdp.sharded_rng(model, seed). If the values are meant to repeat, "
                f"call set_order_check('off') on the root, or set {LEVEL_VARIABLE}=off."
            )


def _and_more(found: Mapping[str, object]) -> str:
    return f", and so {len(found) - 1} other parameters" if len(found) > 1 else ""


def _model_lines(root: FSDPState, states: Mapping[str, FSDPState], axes: DataParallelAxes) -> Iterator[str]:
    options = root.options
    yield (
        f"mesh of ranks {axes.mesh.mesh.tolist()}, order check {str(options.of_plugins.get('order check'))!r}, "
        f"max_fused_bytes {options.max_fused_bytes}, max_unsharded_bytes {options.max_unsharded_bytes}, "
        f"prefetch_limit {options.prefetch_limit}, "
        f"deterministic algorithms {torch.are_deterministic_algorithms_enabled()}"
    )
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


def check_settings(root: FSDPState, states: Iterable[FSDPState]) -> None:
    """Check that no state has another value of a root setting than ``root``, except the default, for the root's value.

    Raises:
        ConfigurationError: a group below ``root`` has another value. The text has both.
    """
    of_root = _values(root)
    for state in states:
        for name, value in _values(state).items():
            if value not in (of_root.get(name), None):
                setter = "set_order_check" if name == "order check" else "set_schedule"
                remedy = f"Call {setter} on the root only."
                remedy = "Give all of them meshes of one device type." if name == "device" else remedy
                raise ConfigurationError(
                    f"the {name} of {state.name!r} ({state.class_name}) is {value}, but that of {root.name!r} "
                    f"({root.class_name}), which contains it, is {of_root.get(name)}, and one counts for all. {remedy}"
                )


def _values(state: FSDPState) -> dict[str, object]:
    options = {name: getattr(state.options, name) for name in ROOT_OPTIONS}
    return {"device": state.group.axes.device, **state.options.of_plugins, **options}
