"""The epochs of memory shared between ranks: within one, ranks read the shards or full parameters of others.

A barrier ends an epoch. It is launched when a pass has launched all else, so that there is one wait, and before an
optimizer's step if a forward left parameters in use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast
from weakref import ref

import torch

from composable_fsdp._comm.communicator import AliasingCommunicator, barrier
from composable_fsdp._core.seams import Observer, Root
from composable_fsdp._memory.streams import Work
from composable_fsdp._runtime.groups.state import FSDPState, state_of_parameter
from composable_fsdp._runtime.groups.state_machine import Pass

__all__ = ["Epochs"]


class Epochs(Observer):
    """Ends the epochs of roots with parameters in shared memory."""

    def __init__(self) -> None:
        self._of_roots: tuple[ref[_EpochsOfRoot], ...] = ()
        """The epochs of all roots, oldest first: in the same order on every rank, as barriers are."""

    def for_root(self, root: Root) -> Observer | None:
        axes = (pgs.axes.shard for state in root.states.values() for pgs in state.group.process_groups)
        aliasing = [cast(AliasingCommunicator, c) for c in dict.fromkeys(axes) if c.traits.aliases and c.size > 1]
        if not aliasing:
            return None
        known = _EpochsOfRoot(root, aliasing)
        self._of_roots = (*(each for each in self._of_roots if each() is not None), ref(known))
        return known

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait until no rank reads shared memory that ``optimizer`` will write. It is looked up only if needed."""
        awaiting = [
            known for each in self._of_roots if (known := each()) is not None and known.is_idle and known.awaited
        ]
        if awaiting:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            own = {state for p in parameters if (state := state_of_parameter(p)) is not None}
            for known in awaiting:
                if not own.isdisjoint(known.states):
                    _wait_for(known.end("optimizer step", known.awaited))


class _EpochsOfRoot(Observer):
    """The epochs of one root. ``communicators`` are the shard axes over which parameters may be in shared memory."""

    def __init__(self, root: Root, communicators: Sequence[AliasingCommunicator]) -> None:
        self._root = ref(root)
        self._communicators = communicators
        self.states = root.states.values()

    @property
    def is_idle(self) -> bool:
        root = self._root()
        return root is not None and root.current_pass is Pass.IDLE

    @property
    def awaited(self) -> set[AliasingCommunicator]:
        """The axes over which ranks may read shared memory: the same on every rank."""
        process_groups = (pgs for state in self.states for pgs in state.group.process_groups)
        return {cast(AliasingCommunicator, pgs.axes.shard) for pgs in process_groups if pgs.awaits_epoch_end}

    def end(self, occasion: str, awaited: Collection[AliasingCommunicator]) -> list[Work]:
        """Launch the end of the epoch: this rank reads nothing in it until the next all-gather.

        Once the returned works are done, no rank reads there, and each may write.

        Args:
            occasion: name of the event in errors.
            awaited: communicators over which ranks have read since the epoch began. The others need no synchronization.
        """
        works = [barrier(c, occasion, ends_epoch=True) for c in self._communicators if c in awaited]
        for state in self.states if works else ():
            state.group.note_epoch_end()
        return works

    def before_end(self, root: Root, which: Pass) -> Sequence[Work]:
        if which is Pass.BACKWARD:
            return self.end("end of backward", self._communicators)
        if not root.plans.runs_on_all_ranks:
            return ()  # a forward that gathered nothing must not change what ranks do together
        if not root.leads_to_backward:  # kept parameters may be used in forwards that other ranks do not run
            for state in self.states:
                state.group.copy_out_shared()
        return self.end("end of forward", self.awaited)

    def kept(self, root: Root, state: FSDPState) -> None:
        """Use a copy: other ranks may update their shards while forwards here still use the parameters."""
        state.group.copy_out_shared()

    def unsharded(self, root: Root, state: FSDPState) -> None:
        """Use a copy at once: other ranks may change their shards, and may not run the forwards that use it."""
        shared = dict.fromkeys(pgs.axes.shard for pgs in state.group.process_groups if pgs.awaits_epoch_end)
        if shared:
            state.group.copy_out_shared()
            awaited = [cast(AliasingCommunicator, communicator) for communicator in shared]
            _wait_for([barrier(c, f"unshard() of {state.name}", ends_epoch=False) for c in awaited])
            state.group.note_epoch_end()

    def have_met(self, root: Root) -> None:
        for state in self.states:
            state.group.note_epoch_end()


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
