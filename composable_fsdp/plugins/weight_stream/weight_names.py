"""The tensors that a stream yields, from the parameters of the model: renamed, joined along dim 0, or split. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch

from composable_fsdp.errors import ConfigurationError

__all__ = ["JoinPart", "KeyMap", "Named", "PackedTensor", "Unit", "units_of"]


@dataclass(frozen=True)
class JoinPart:
    """A result of ``key_map``: the parameter is part ``index`` of ``count`` of the tensor ``name``, along dim 0.

    Parts may have different numbers of rows. Their other dims, and their dtypes after a cast, must be equal.
    """

    name: str
    index: int
    count: int


KeyMap = Callable[[str], str | JoinPart | Mapping[str, int] | None]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A contiguous tensor in a flat buffer of bytes, ``offset`` bytes from its start."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Named(NamedTuple):
    """A parameter: its names, the first one first, the shape of the full tensor, and the dtype that it is sent in."""

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Unit:
    """A tensor of the stream, or those of which a parameter is split. They are in one bucket.

    Invariant: the tensors, one after the other, have the bytes of the parameters ``members``, one after the other.
    """

    members: tuple[int, ...]
    tensors: tuple[PackedTensor, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of a tied tensor, each with the name of the tensor."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def units_of(parameters: Sequence[Named], key_map: KeyMap | None) -> list[Unit]:
    """Return the units of ``parameters`` in their order. A joined tensor has the place of its first part.

    Raises:
        ConfigurationError: ``key_map`` has a wrong type or result, parts or rows are missing or do not fit, or two
            tensors have the same name.
    """
    if key_map is not None and not callable(key_map):
        raise ConfigurationError(
            f"key_map must be a function of a name, such as names.get, not {type(key_map).__name__}."
        )
    members: dict[str, list[tuple[JoinPart, int]]] = {}  # by tensor: its parts, and the parameters that they are
    aliases: dict[str, dict[str, str]] = {}  # by tensor
    splits: dict[str, Mapping[str, int]] = {}  # by the first tensor of each
    for i, parameter in enumerate(parameters):
        targets: list[JoinPart] = []
        for name in parameter.names:
            target = name if key_map is None else key_map(name)
            if isinstance(target, Mapping):
                first = next(iter(target), "")
                splits[first], target = target, first
            part = JoinPart(target, 0, 1) if isinstance(target, str) else target
            if part is not None and not isinstance(part, JoinPart):
                raise ConfigurationError(
                    f"key_map({name!r}) is of type {type(part).__name__}. Return a name, None to leave the parameter "
                    "out, JoinPart(name, index, count), or {name: rows, ...} to split it."
                )
            if part is not None and part not in targets:
                targets.append(part)
        if len(targets) > 1 and any(part.count != 1 or part.name in splits for part in targets):
            raise ConfigurationError(
                f"key_map joins or splits one of the names {list(parameter.names)} of a tied parameter. Map the "
                "others to None."
            )
        for part in targets[:1]:
            members.setdefault(part.name, []).append((part, i))
            aliases[part.name] = dict.fromkeys((other.name for other in targets[1:]), part.name)
    units = []
    for name, parts in members.items():
        parts.sort(key=lambda each: each[0].index)
        known = [parameters[i] for _, i in parts]
        if [(part.index, part.count) for part, _ in parts] != [(k, len(parts)) for k in range(len(parts))]:
            raise ConfigurationError(
                f"the stream would have two tensors called {name!r}, or one that lacks parts. key_map gives it "
                f"{[(each.names[0], part.index, part.count) for (part, _), each in zip(parts, known, strict=True)]}: "
                "names, indices, counts."
            )
        shape, dtype = known[0].shape, known[0].dtype
        if len(known) > 1:
            if not all(each.shape and (each.shape[1:], each.dtype) == (shape[1:], dtype) for each in known):
                texts = {each.names[0]: (each.shape, each.dtype) for each in known}
                raise ConfigurationError(f"parts of {name!r} differ in dtype or in dims after the first: {texts}.")
            shape = (sum(each.shape[0] for each in known), *shape[1:])
        tensors, end = [], 0
        rows = splits.get(name)
        if rows is not None and (not rows or not shape or min(rows.values()) < 0 or sum(rows.values()) != shape[0]):
            raise ConfigurationError(
                f"key_map splits {known[0].names[0]!r} of shape {shape} into {dict(rows)}: these are not its rows."
            )
        for each, own in [(name, shape)] if rows is None else [(n, (count, *shape[1:])) for n, count in rows.items()]:
            tensors.append(PackedTensor(each, own, dtype, end))
            end += tensors[-1].nbytes
        units.append(Unit(tuple(i for _, i in parts), tuple(tensors), aliases[name]))
    seen: set[str] = set()
    for each in (each for unit in units for each in (*(tensor.name for tensor in unit.tensors), *unit.aliases)):
        if each in seen:
            raise ConfigurationError(f"the stream would have two tensors called {each!r}. Change key_map.")
        seen.add(each)
    return units
