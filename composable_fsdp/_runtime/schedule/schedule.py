"""The schedule of one step as a value: the actions that a root performs at each event. Pure.

A dry run makes schedules, and ``simulate`` predicts their time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import NamedTuple, TypeAlias

__all__ = [
    "Action",
    "Event",
    "Free",
    "Gather",
    "GradBucket",
    "Hook",
    "Reduce",
    "Schedule",
    "Shrink",
    "Step",
    "Wait",
    "WaitReduce",
    "describe_groups",
]


def describe_groups(names: Sequence[str]) -> str:
    """Return the name in errors of several groups that share a collective."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} groups)"


class Hook(Enum):
    """A hook of the runtime that fires for a group, for a bucket of it, or for the whole iteration."""

    PRE_FORWARD = "pre-forward"
    POST_FORWARD = "post-forward"
    END_FORWARD = "end of forward"
    PRE_BACKWARD = "pre-backward"
    GRAD_READY = "gradients ready"
    POST_BACKWARD = "post-backward"
    END_BACKWARD = "end of backward"

    __hash__ = object.__hash__  # by identity: ``Enum`` hashes member names in Python


class Event(NamedTuple):
    """One firing of a hook. ``group`` is empty for the ends of passes; ``bucket`` is that of ``GRAD_READY``."""

    hook: Hook
    group: str = ""
    bucket: int = -1

    def __str__(self) -> str:
        bucket = f" bucket {self.bucket}" if self.bucket >= 0 else ""
        return f"{self.hook.value} {self.group}{bucket}".rstrip()


class GradBucket(NamedTuple):
    """A bucket of gradients: ``number`` counts the buckets of ``group`` in the order of their reduction."""

    group: str
    number: int

    def __str__(self) -> str:
        return f"{self.group}[{self.number}]"


@dataclass(frozen=True, slots=True)
class Gather:
    """Launch one all-gather of ``groups``. Groups that are unsharded or in flight already are left out."""

    groups: tuple[str, ...]

    def __str__(self) -> str:
        return f"gather {', '.join(self.groups)}"


@dataclass(frozen=True, slots=True)
class _OnGroup:
    """An action on one group."""

    group: str

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.group}"


class Wait(_OnGroup):
    """Wait for the all-gather of ``group`` and register its unsharded parameters."""

    __slots__ = ()


class Free(_OnGroup):
    """Register the sharded parameters of ``group`` and free the unsharded ones."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Shrink:
    """Free ``group`` except for a slice from which ``mesh_size`` neighbouring ranks can gather it again."""

    group: str
    mesh_size: int

    def __str__(self) -> str:
        return f"shrink {self.group} to {self.mesh_size} ranks"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Launch one reduction of ``buckets``; a partial one ends after the shard axis, and its sums are kept."""

    buckets: tuple[GradBucket, ...]
    partial: bool = False

    def __str__(self) -> str:
        where = " over the shard axis" if self.partial else ""
        return f"reduce {', '.join(map(str, self.buckets))}{where}"


@dataclass(frozen=True, slots=True)
class WaitReduce:
    """Complete the oldest ``count`` reductions in flight and set their gradients."""

    count: int

    def __str__(self) -> str:
        return f"wait for {self.count} reduction{'s' if self.count > 1 else ''}"


Action: TypeAlias = Gather | Wait | Free | Shrink | Reduce | WaitReduce


class Step(NamedTuple):
    """An event and the actions that it triggers, in order."""

    event: Event
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """The actions at each event of a forward and its backward, as this rank performs them.

    Invariants: a group is waited for before its modules compute, and freed or kept after. Every bucket is reduced once.
    A schedule without its prefetches computes the same values. ``print`` shows it as a table.
    """

    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, hook: Hook) -> list[Step]:
        """Return the steps of ``hook``, in order."""
        return [step for step in self.steps if step.event.hook is hook]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        if not self.steps:
            return "(no forward has run yet, so the order of the groups is unknown)"
        width = max(len(str(step.event)) for step in self.steps)
        return "\n".join(
            f"{step.event!s:<{width}} | {'; '.join(map(str, step.actions))}".rstrip(" |") for step in self.steps
        )
