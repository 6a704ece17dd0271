"""An all-gather over several communicators frees no memory in use if a launch fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests._internals import AllGatherBuffers, Collective, CommStreams, GradientState, StreamLauncher, Traits, Transfer

CPU = torch.device("cpu")


class ShmSocket:
    """A communicator whose operations never complete, or which cannot launch."""

    traits = Traits()
    size = 2

    def __init__(self, *, works: bool) -> None:
        self._works = works

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str) -> ShmSocket:
        if not self._works:
            raise MemoryError(label)
        return self


class ProcessGroups:
    def __init__(self, wire: ShmSocket) -> None:
        self.gather = wire


class Bucket:
    """A bucket whose parameters are all zero-copy."""

    cached_part = None
    needs_barrier = False

    def __init__(self, wire: ShmSocket) -> None:
        self.pgs = ProcessGroups(wire)
        self.is_freed = False

    def allocate_gather(self) -> None: ...

    def prepare_gather(self, cast: None) -> AllGatherBuffers:
        return AllGatherBuffers([Transfer(torch.zeros(4), torch.ones(2))], [])

    def free(self) -> None:
        self.is_freed = True


class Group:
    name = "a"
    slices = ()
    gradient_state = GradientState.NONE

    def __init__(self, buckets: list[Any]) -> None:
        self.axes = SimpleNamespace(device=CPU)
        self.buckets, self.last_gather = buckets, None

    def needs_gather(self) -> bool:
        return True


@pytest.mark.behaviour("H-01")
@pytest.mark.parametrize("first_works", [True, False])
def test_memory_is_freed_after_a_failed_launch_unless_it_is_in_flight(first_works: bool) -> None:
    buckets: list[Any] = [Bucket(ShmSocket(works=first_works)), Bucket(ShmSocket(works=False))]
    group: Any = Group(buckets)
    with pytest.raises(MemoryError, match="all-gather of a"):
        StreamLauncher(CommStreams(CPU)).gather([group], "all-gather of a")
    assert [bucket.is_freed for bucket in buckets] == [not first_works] * 2
