"""Checks that the values with which ranks begin belong together, from samples of parameters and of their shards.

Two mistakes train without an error and give a wrong model. Ranks that built different values hold shards of different
models. Ranks that ran one random initialisation with one seed on their shards hold copies of the same shard.

Invariant: a rank's :class:`Facts` have a fixed size, so that they fit into the message by which ranks compare models.
Details are exchanged only where the facts of ranks do not agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

import torch
from torch import nn

__all__ = [
    "SAMPLED",
    "Candidate",
    "Facts",
    "Start",
    "equal_shards",
    "host_bytes",
    "sample",
    "shard_details",
    "start_details",
    "start_of",
    "unlike_starts",
]

SAMPLED = 64
"""Elements of one tensor that are compared."""
_SLOTS = 32
_FEWEST_DISTINCT = 8
"""Values by which a sample looks random. Tables of a few constants have fewer."""
_CHANGED, _ANY = "changed", "any"
"""In details of starting values: the shard is not what was cut, and has no values that depend on the start."""


class Start(NamedTuple):
    """Samples of a parameter and of this rank's shard, taken when the parameter was cut."""

    whole: torch.Tensor
    shard: torch.Tensor


def start_of(whole: torch.Tensor, shard: torch.Tensor) -> Start | None:
    """The samples of both, or ``None`` where the tensors have no values that can be sampled."""
    of_whole, of_shard = sample(whole), sample(shard)
    return None if of_whole is None or of_shard is None else Start(of_whole, of_shard)


def sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of up to ``SAMPLED`` elements spread over ``tensor``, 1-d; ``None`` for tensor subclasses and on meta."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
        return None
    values, count = tensor.detach(), tensor.numel()
    step = max(1, count // SAMPLED)
    step -= step > 1 and step % 2 == 0  # odd: an even step would often stay in one column
    if values.is_contiguous():
        return values.view(-1)[::step][:SAMPLED].clone()
    positions = torch.arange(0, count, step, device=values.device)[:SAMPLED]
    return values[torch.unravel_index(positions, values.shape)]


def host_bytes(samples: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of every sample, by one transfer for each device."""
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
    """One parameter as this rank sees it.

    Args:
        name: the same on all ranks, for errors too.
        shape: of this rank's shard.
        itemsize: bytes of an element.
        floating: whether its elements are floating-point numbers.
        whole: the sample of the whole parameter from when it was cut; ``None`` where there was none.
        shard_then: the sample of the shard from then.
        shard: that of the shard now; ``None`` where it cannot be sampled.
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
        """Whether the shard is not what was cut: a load or an initialisation came in between."""
        return self.shard != self.shard_then

    @property
    def counts(self) -> bool:
        """Whether this rank's shard has values that depend on the start. A constant shard, or none, is right anyway."""
        return self._distinct > 1

    @property
    def looks_random(self) -> bool:
        """Whether the shard could come from a generator of random numbers."""
        values = len(self.shard or b"") // self.itemsize
        return self.floating and self._distinct >= max(_FEWEST_DISTINCT, values // 2)

    @property
    def _distinct(self) -> int:
        data = self.shard or b""
        return len({data[i : i + self.itemsize] for i in range(0, len(data), self.itemsize)})


@dataclass(frozen=True)
class Facts:
    """What one rank says of all its parameters over one pair of axes.

    ``start`` is equal on all ranks if they began with the same values and none of these has changed. ``sketch`` has a
    number for each slot that random-looking shards fall into: two ranks with equal shards in a slot have equal numbers.
    """

    start: int
    shard_rank: int
    sketch: tuple[int, ...]

    @staticmethod
    def of(candidates: Sequence[Candidate], shard_rank: int) -> Facts:
        """The facts of the rank with this place on the shard axis."""
        sketch = [0] * _SLOTS
        for each in candidates:
            if each.looks_random and each.shard is not None:
                slot = crc32(each.name.encode()) % _SLOTS
                sketch[slot] ^= _digest(each.name.encode(), repr(each.shape).encode(), each.shard)
        start = _digest(*(part.encode() for each in candidates for part in (each.name, _start_text(each))))
        return Facts(start, shard_rank, tuple(sketch))

    @staticmethod
    def parse(numbers: Sequence[int]) -> Facts:
        """The inverse of :attr:`numbers`."""
        start, shard_rank, *sketch = numbers
        return Facts(start, shard_rank, tuple(sketch))

    @property
    def numbers(self) -> list[int]:
        """64-bit integers, as many whatever the model."""
        return [self.start, self.shard_rank, *self.sketch]

    @staticmethod
    def any_equal_shards(facts: Mapping[int, Facts]) -> bool:
        """Whether ranks with different shards may hold equal values."""
        owners: dict[tuple[int, int], int] = {}
        return any(
            number and owners.setdefault((slot, number), each.shard_rank) != each.shard_rank
            for each in facts.values()
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
    """This rank's text for :func:`unlike_starts`: a word for each candidate, without names, which all ranks know."""
    return " ".join(_start_text(c) if c.counts and c.whole is not None else _ANY for c in candidates)


def unlike_starts(details: Mapping[int, str], names: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Parameters that were not the same on all ranks when they were cut, with the ranks that had equal ones together.

    A parameter that has changed since on any rank does not count: the values that ranks began with are overwritten.
    After a checkpoint was loaded, ranks differ only in which shards are empty: each of these few texts is read once,
    however many ranks there are.

    Args:
        details: of each rank.
        names: of the parameters, in the order in which the texts have them.
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
    """This rank's text for :func:`equal_shards`, out of candidates with their shards and the dims that are cut.

    Shards of one row, or whose first rows are equal, do not take part. Rows that repeat are meant to, such as experts
    that all begin as copies of one layer.
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
    """Parameters of which ranks with different shards hold the same values, and these ranks.

    One such parameter among others that differ is taken for a table that repeats itself, and left out.
    """
    found: dict[str, list[int]] = {}
    compared: set[str] = set()
    everyones = {rank: json.loads(text) for rank, text in sorted(details.items())}
    for name in dict.fromkeys(name for own in everyones.values() for name in own):
        by_values: dict[str, list[int]] = {}
        for rank, own in everyones.items():
            if name in own:
                by_values.setdefault(own[name], []).append(rank)
        if len({shard_ranks[rank] for ranks in by_values.values() for rank in ranks}) > 1:
            compared.add(name)
        for ranks in by_values.values():
            if len({shard_ranks[rank] for rank in ranks}) > 1:
                found.setdefault(name, ranks)
    return found if len(found) > 1 or found.keys() == compared else {}
