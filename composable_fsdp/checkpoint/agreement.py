"""What ranks that save or load together must agree on: that nothing is wrong on any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from composable_fsdp.errors import CheckpointError, FSDPError

__all__ = ["Ranks"]

T = TypeVar("T")
_Problem = tuple[type[FSDPError], str]


class Ranks:
    """Those that make a call together.

    Args:
        group: theirs; ``None`` for the default process group, or this process alone where there is none. Ranks are
            counted within it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The ``value`` of every rank, in their order, on all of them."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, self._group)
        return values

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Raises on every rank what the body, which must not communicate, raised on any of them.

        Raises:
            FSDPError: of the type that the first of them raised, ``CheckpointError`` for what is not ours. With
                different texts, all are in it, each with the ranks that it is from.
        """
        problem: _Problem | None = None
        cause: Exception | None = None
        try:
            yield
        except FSDPError as error:
            cause, problem = error, (type(error), str(error))
        except Exception as error:
            cause, problem = error, (CheckpointError, f"{type(error).__name__}: {error}")
        problems = self.gather(problem)
        first = next((p for p in problems if p is not None), None)
        if first is not None:
            raise first[0](_text(problems)) from cause


def _text(problems: Sequence[_Problem | None]) -> str:
    """One text if all ranks have the same."""
    ranks: dict[str, list[str]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            ranks.setdefault(problem[1], []).append(str(rank))
    if len(ranks) == 1 and None not in problems:
        return next(iter(ranks))
    return "\n".join(f"rank {', '.join(numbers)}: {text}" for text, numbers in ranks.items())
