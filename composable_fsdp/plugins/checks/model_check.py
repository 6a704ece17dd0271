"""The check that all ranks built the same model and started from the same values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import nn

from composable_fsdp._consistency.order_check import LEVEL_VARIABLE, OrderCheck
from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp._consistency.verify_ranks import SHOWN_RANKS, gather_texts, verify_same
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.params import ShardedParameter, local_part
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState, state_of_parameter
from composable_fsdp.errors import DivergenceError, ParameterError

# -- Samples of parameters and shards, by which the initial values of ranks are compared
#
# Two mistakes raise no error but train a wrong model. If ranks built different values, they hold shards of different
# models. If ranks ran the same random initialization with the same seed on their shards, they hold copies of one shard.
#
# Invariant: a rank's :class:`Facts` have a fixed size, so that they fit into the message that compares models. Details
# are exchanged only if the facts disagree.

SAMPLED = 64
"""The number of elements compared per tensor."""
_SLOTS = 32
_MIN_DISTINCT = 8
"""The number of distinct values from which a sample looks random. Tables of a few constants have fewer."""
_CHANGED, _ANY = "changed", "any"
"""Words in start details: the shard has changed since it was cut, or does not depend on the initial values."""


class Start(NamedTuple):
    """Samples of a parameter and of this rank's shard, taken when the parameter was sharded."""

    whole: torch.Tensor
    shard: torch.Tensor


def sample_start(whole: torch.Tensor, shard: torch.Tensor) -> Start | None:
    """Return samples of ``whole`` and ``shard``, or ``None`` if either cannot be sampled."""
    full_sample, shard_sample = sample(whole), sample(shard)
    return None if full_sample is None or shard_sample is None else Start(full_sample, shard_sample)


def sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return up to ``SAMPLED`` elements spread over ``tensor``, 1-d, or ``None`` for subclasses and meta tensors."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
        return None
    values, count = tensor.detach(), tensor.numel()
    step = max(1, count // SAMPLED)
    step -= step > 1 and step % 2 == 0  # odd, because an even step would often sample one column only
    if values.is_contiguous():
        return values.view(-1)[::step][:SAMPLED].clone()
    positions = torch.arange(0, count, step, device=values.device)[:SAMPLED]
    return values[torch.unravel_index(positions, values.shape)]


def host_bytes(samples: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of every sample, with one copy from each device."""
    found = [b""] * len(samples)
    for device in dict.fromkeys(each.device for each in samples):
        here = [i for i, each in enumerate(samples) if each.device == device]
        data = torch.cat([samples[i].view(-1, 1).view(torch.uint8).view(-1) for i in here]).cpu().numpy().tobytes()
        begin = 0
        for i in here:
            found[i] = data[begin : begin + samples[i].nbytes]
            begin += samples[i].nbytes
    return found


@dataclass(frozen=True)
class Candidate:
    """One parameter on this rank.

    Args:
        name: name, the same on all ranks.
        shape: shape of this rank's shard.
        itemsize: bytes per element.
        floating: whether the elements are floating-point numbers.
        whole: sample of the full parameter when it was sharded, or ``None``.
        shard_then: sample of the shard from then.
        shard: sample of the current shard, or ``None`` if it cannot be sampled.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    floating: bool
    whole: bytes | None
    shard_then: bytes | None
    shard: bytes | None

    @property
    def changed(self) -> bool:
        """True if the shard has changed since it was cut, by a load or an initialization."""
        return self.shard != self.shard_then

    @property
    def depends_on_start(self) -> bool:
        """True if this rank's shard depends on the initial values. A constant or empty shard does not."""
        return self._distinct > 1

    @property
    def looks_random(self) -> bool:
        """True if the shard could come from a random number generator."""
        values = len(self.shard or b"") // self.itemsize
        return self.floating and self._distinct >= max(_MIN_DISTINCT, values // 2)

    @property
    def _distinct(self) -> int:
        data = self.shard or b""
        return len({data[i : i + self.itemsize] for i in range(0, len(data), self.itemsize)})


class Facts(NamedTuple):
    """A summary of all parameters of one rank over one pair of axes, in as many 64-bit integers for every model."""

    start: int
    """Equal on all ranks if their initial values were the same and have not changed."""
    shard_rank: int
    """The rank's index on the shard axis."""
    sketch: list[int]
    """A number for each slot that random-looking shards are hashed to by name. Equal shards give equal numbers."""

    @staticmethod
    def of(candidates: Sequence[Candidate], shard_rank: int) -> Facts:
        """Return the facts of the rank with index ``shard_rank`` on the shard axis."""
        sketch = [0] * _SLOTS
        for each in candidates:
            if each.looks_random and each.shard is not None:
                slot = crc32(each.name.encode()) % _SLOTS
                sketch[slot] ^= _digest(each.name.encode(), repr(each.shape).encode(), each.shard)
        start = _digest(*(part.encode() for each in candidates for part in (each.name, _start_text(each))))
        return Facts(start, shard_rank, sketch)


def any_equal_shards(facts: Iterable[Facts]) -> bool:
    """Return whether ranks with different shards may hold equal values."""
    owners: dict[tuple[int, int], int] = {}
    return any(
        number and owners.setdefault((slot, number), each.shard_rank) != each.shard_rank
        for each in facts
        for slot, number in enumerate(each.sketch)
    )


def _digest(*parts: bytes) -> int:
    return int.from_bytes(blake2b(b"\0".join(parts), digest_size=8).digest(), "little", signed=True)


def _start_text(candidate: Candidate) -> str:
    if candidate.whole is None:
        return "unknown"
    return _CHANGED if candidate.changed else f"{_digest(candidate.whole):x}"


# -- different starting values


def start_details(candidates: Sequence[Candidate]) -> str:
    """Return this rank's text for :func:`differing_starts`: a word per candidate, in the order that all ranks know."""
    return " ".join(_start_text(c) if c.depends_on_start and c.whole is not None else _ANY for c in candidates)


def differing_starts(details: Mapping[int, str], names: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Return parameters whose initial values differed between ranks, with the ranks grouped by equal values.

    A parameter that has changed since on any rank is skipped, because its initial values are overwritten. After a
    checkpoint was loaded, ranks differ only in which shards are empty, so there are few distinct texts, and each is
    parsed once.

    Args:
        details: the text of each rank.
        names: names of the parameters, in the order of the texts.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(details.items()):
        by_text.setdefault(text, []).append(rank)
    starts: dict[str, dict[str, list[int]]] = {name: {} for name in names}
    for text, ranks in by_text.items():
        for name, start in zip(names, text.split(), strict=True):
            if start != _ANY:
                starts[name].setdefault(start, []).extend(ranks)
    unlike = {name: found for name, found in starts.items() if len(found) > 1 and _CHANGED not in found}
    return {name: {start: sorted(ranks) for start, ranks in found.items()} for name, found in unlike.items()}


# -- equal shards


def shard_details(candidates: Sequence[tuple[Candidate, torch.Tensor, int]]) -> str:
    """Return this rank's text for :func:`equal_shards`, from candidates with their shards and sharded dims.

    Shards of one row, or whose first two rows are equal, are skipped. Repeated rows are intended, as for experts that
    are all initialized as copies of one layer.
    """
    found = {}
    for candidate, shard, dim in candidates:
        if not candidate.looks_random or shard.size(dim) < 2:
            continue
        if not torch.equal(shard.select(dim, 0), shard.select(dim, 1)):
            data = shard.detach().contiguous().view(-1, 1).view(torch.uint8).cpu().numpy().tobytes()
            found[candidate.name] = f"{candidate.shape} {_digest(data):x}"
    return json.dumps(found)


def equal_shards(details: Mapping[int, str], shard_ranks: Mapping[int, int]) -> dict[str, list[int]]:
    """Return parameters of which ranks with different shards hold equal values, and these ranks.

    A single such parameter among others that differ is considered a table that repeats itself, and skipped.
    """
    found: dict[str, list[int]] = {}
    compared: set[str] = set()
    shards_by_rank = {rank: json.loads(text) for rank, text in sorted(details.items())}
    for name in dict.fromkeys(name for own in shards_by_rank.values() for name in own):
        by_values: dict[str, list[int]] = {}
        for rank, own in shards_by_rank.items():
            if name in own:
                by_values.setdefault(own[name], []).append(rank)
        if len({shard_ranks[rank] for ranks in by_values.values() for rank in ranks}) > 1:
            compared.add(name)
        for ranks in by_values.values():
            if len({shard_ranks[rank] for rank in ranks}) > 1:
                found.setdefault(name, ranks)
    return found if len(found) > 1 or found.keys() == compared else {}


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
    root: FSDPState, states: Mapping[str, FSDPState], axes: DataParallelAxes, parameters: Mapping[str, ShardedParameter]
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
