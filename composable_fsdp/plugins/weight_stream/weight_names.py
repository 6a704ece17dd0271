"""The tensors that a stream yields, from the parameters of the model: renamed, joined along dim 0, or split. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

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


Target = str | JoinPart | Mapping[str, int] | None
KeyMap = Callable[[str], Target] | Mapping[str, Target]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A contiguous tensor in a flat buffer of bytes, ``offset`` bytes from its start."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter: its names, the first one first, the shape of the full tensor, and the dtype that it is sent in.

    ``is_whole`` is true if it can only be renamed, because it is not one plain tensor.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_whole: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are in one bucket.

    Invariant: the parameters ``members``, one after the other, have the same bytes as the tensors, at their offsets.
    """

    members: tuple[int, ...]
    tensors: tuple[PackedTensor, ...]
    nbytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors, with the names of their tensors."""


def units_of(parameters: Sequence[Named], key_map: KeyMap | None) -> list[Unit]:
    """Return the units of ``parameters`` in their order. A joined tensor has the place of its first part.

    Raises:
        ConfigurationError: ``key_map`` has a wrong type or result, parts are missing or do not fit, or two tensors have
            the same name.
    """
    if key_map is None:
        found: list[Unit | _Join] = [_renamed(i, p, p.names) for i, p in enumerate(parameters)]
    elif isinstance(key_map, Mapping) or callable(key_map):
        found = list(_mapped(parameters, key_map))
    else:
        raise ConfigurationError(f"key_map must be a mapping or a callable of names, not {type(key_map).__name__}.")
    units = [each.unit(parameters) if isinstance(each, _Join) else each for each in found]
    seen: set[str] = set()
    for name in (name for unit in units for name in (*(t.name for t in unit.tensors), *unit.aliases)):
        if name in seen:
            raise ConfigurationError(f"the stream would have two tensors called {name!r}. Change key_map.")
        seen.add(name)
    return units


def _renamed(i: int, parameter: Named, names: Sequence[str]) -> Unit:
    first, *others = names
    aliases = dict.fromkeys(others, first) if others else {}
    aliases.pop(first, None)
    return Unit((i,), (PackedTensor(first, parameter.shape, parameter.dtype),), parameter.nbytes, aliases)


def _mapped(parameters: Sequence[Named], key_map: KeyMap) -> Iterator[Unit | _Join]:
    target_of: Callable[[str], Any] = (lambda n: key_map.get(n, n)) if isinstance(key_map, Mapping) else key_map
    joins: dict[str, _Join] = {}
    for i, parameter in enumerate(parameters):
        targets = {name: target for name in parameter.names if (target := target_of(name)) is not None}
        if not targets:
            continue
        name, target = next(iter(targets.items()))
        if len(targets) > 1 and not all(isinstance(each, str) for each in targets.values()):
            raise ConfigurationError(
                f"key_map joins or splits one of the names {list(targets)} of a tied parameter. Map the others to None."
            )
        if isinstance(target, str):
            yield _renamed(i, parameter, [each for each in targets.values() if isinstance(each, str)])
            continue
        if parameter.is_whole or not parameter.shape:
            kind = "a tensor subclass" if parameter.is_whole else "a scalar"
            raise ConfigurationError(f"key_map joins or splits {name!r}, which is {kind} and can only be renamed.")
        if isinstance(target, JoinPart):
            known = joins.get(target.name)
            join = joins.setdefault(target.name, _Join(target.name, target.count))
            join.add(name, i, target)
            if known is None:
                yield join
        elif isinstance(target, Mapping):
            yield _split(name, i, parameter, target)
        else:
            raise ConfigurationError(
                f"key_map({name!r}) is of type {type(target).__name__}. Return a name, None to leave the parameter "
                "out, JoinPart(name, index, count), or {name: rows, ...} to split it."
            )


def _split(name: str, i: int, parameter: Named, rows: Mapping[str, int]) -> Unit:
    if not rows or sum(rows.values()) != parameter.shape[0] or any(count < 0 for count in rows.values()):
        raise ConfigurationError(
            f"key_map splits {name!r} of {parameter.shape[0]} rows into {dict(rows)}, which has {sum(rows.values())}."
        )
    row_bytes = prod(parameter.shape[1:]) * parameter.dtype.itemsize
    begins = accumulate(rows.values(), initial=0)
    tensors = tuple(
        PackedTensor(each, (count, *parameter.shape[1:]), parameter.dtype, begin * row_bytes)
        for (each, count), begin in zip(rows.items(), begins, strict=False)
    )
    return Unit((i,), tensors, parameter.nbytes)


@dataclass(slots=True)
class _Join:
    """The parts of one tensor that have been found."""

    name: str
    count: int
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)

    def add(self, name: str, i: int, part: JoinPart) -> None:
        if part.count != self.count or not 0 <= part.index < self.count or part.index in self.parts:
            raise ConfigurationError(
                f"key_map({name!r}) is {part}, but {self.name!r} has {self.count} parts and of them "
                f"{ {index: known for index, (known, _) in sorted(self.parts.items())} }. Give each part of a tensor "
                "its own index, from 0, and the same count."
            )
        self.parts[part.index] = name, i

    def unit(self, parameters: Sequence[Named]) -> Unit:
        missing = [index for index in range(self.count) if index not in self.parts]
        if missing:
            raise ConfigurationError(f"key_map gives {self.name!r} no parts {missing} of {self.count}.")
        members = tuple(self.parts[index][1] for index in range(self.count))
        parts = [parameters[i] for i in members]
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            found = {self.parts[index][0]: (part.shape, part.dtype) for index, part in enumerate(parts)}
            raise ConfigurationError(f"parts of {self.name!r} differ in dtype or in dims after the first: {found}.")
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        tensor = PackedTensor(self.name, shape, parts[0].dtype)
        return Unit(members, (tensor,), sum(part.nbytes for part in parts))


def moved(tensor: PackedTensor, offset: int) -> PackedTensor:
    """Return ``tensor``, ``offset`` bytes further."""
    return replace(tensor, offset=tensor.offset + offset)
