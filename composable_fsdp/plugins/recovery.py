"""Recovery after a failed step: a rendezvous of all ranks, then new connections if ranks stopped at different places.

Work in flight on the old connections is lost on all ranks. The rendezvous comes first because a rank may get here long
before the others have noticed the failure. If all ranks failed at the same place, nothing is lost.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from composable_fsdp._consistency.main_thread import has_ended
from composable_fsdp._consistency.process_groups import timeout_of
from composable_fsdp._consistency.rank_report import ABANDONED, RESET, format_ranks
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp._core.comm import communicators, reopen
from composable_fsdp._core.hooks import roots_stepped_by, sharded_parameters
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import connections
from composable_fsdp.errors import DivergenceError, PeerError


class Recovery(Observer):
    """Lets the ranks of one root meet in ``reset_iter_state``, and reconnect if they must.

    A rank may call it because its program raised outside of all passes, where the library sees no failure. The others
    may be in a pass then, and wait for this rank: they are told that it will not come.
    """

    def __init__(self) -> None:
        self._steps = 0
        """The number of optimizer steps of the root at the last rendezvous."""
        self._taken: dict[int, int] = {}
        """By rank, the number of optimizer steps since the last rendezvous, if a step has failed on some rank."""

    def for_root(self, root: ObservedRoot) -> Observer:
        return Recovery()

    def before_first_hook(self, root: ObservedRoot) -> None:
        """Refuse a pass after an optimizer step that raised, since it may have succeeded on other ranks.

        Raises:
            DivergenceError: such a step was one of parameters of ``root``.
        """
        failed, watchdog = failed_steps(root), job_watchdog()
        if failed and watchdog is not None and connections(root.states.values()):
            name, number = type(failed[0].optimizer).__name__, _completed_steps(root)
            text = (
                f"raised in a step of {name}, so that it holds parameters of {number} optimizer steps, and ranks on "
                f"which the step succeeded hold those of {number + 1}"
            )
            watchdog.fail(text)
            raise DivergenceError(
                f"rank {dist.get_rank()} {text}. Call reset_iter_state() on the root module of all ranks: it raises if "
                "ranks hold different steps. Then load a checkpoint."
            )

    def reset(self, root: ObservedRoot) -> bool:
        """Wait for all ranks that hold parameters of ``root``. All of them must call it.

        Raises:
            PeerError: some ranks did not come within the timeout of the process groups. The text names them.
        """
        states, watchdog = root.states.values(), job_watchdog()
        groups, steps_that_raised = connections(states), failed_steps(root)
        for step in steps_that_raised:
            forget_step(step)
        if watchdog is None:
            return False
        failed = watchdog.has_failed or any(each.is_broken for each in communicators(groups))
        if not groups:
            return failed
        meshes = {pgs.axes.mesh for state in states for pgs in state.group.process_groups}
        ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})  # the same on each of them
        completed = _completed_steps(root)
        if not failed:
            failed = bool(steps_that_raised) or any(map(root.may_come_back_to, states))
            watchdog.fail(ABANDONED if failed else RESET, tuple(ranks))
        # Meet, each rank with the number of its steps, whether one failed, and its positions.
        own = f"{completed - self._steps} {failed:d} {' '.join(map(_position, groups))}"
        seconds = max(map(timeout_of, groups))
        notes = watchdog.meet(ranks, own, seconds, "all ranks must call reset_iter_state() to go on")
        watchdog.go_on()
        self._steps = completed
        by_rank = {rank: note.split(" ", 2) for note, who in notes.items() for rank in who}
        some_failed = any(failed == "1" for _, failed, _ in by_rank.values())
        if some_failed:
            self._taken = {rank: int(taken) for rank, (taken, *_) in sorted(by_rank.items())}
        # At the same place, the work in flight will complete. Otherwise connect anew.
        places = {rank: place for rank, (*_, place) in sorted(by_rank.items())}
        if "broken" not in own and len(set(places.values())) == 1:
            return some_failed
        for communicator in communicators(groups):
            communicator.abandon()  # nothing writes to the memory of work in flight any more
        root.abandon()
        try:
            reopen(connections(states))
        except PeerError as error:
            lines = "".join(f"\n  rank {rank}: {place}" for rank, place in places.items())
            text = f"{error}\nNumbers of operations that ranks launched over each process group:{lines}"
            raise PeerError(text, error.ranks) from error
        return True

    def after_reset(self, root: ObservedRoot) -> None:
        """Check that all ranks took the same number of optimizer steps.

        Raises:
            DivergenceError: some ranks took a step that others did not, so their shards are of different steps.
        """
        taken, self._taken = self._taken, {}
        most = max(taken.values(), default=0)
        behind = [rank for rank, steps in taken.items() if steps < most]
        if behind:
            ahead = [rank for rank, steps in taken.items() if steps == most]
            numbers = ", ".join(f"rank {rank}: {steps}" for rank, steps in taken.items())
            raise DivergenceError(
                f"{format_ranks(ahead)} took an optimizer step after a backward, or in a step, that failed on "
                f"{format_ranks(behind)}, so that shards are of different steps (since the last reset, {numbers}). "
                "Load a checkpoint on all ranks. composable_fsdp.find_nonfinite(model), called between backward and "
                "step, raises if another rank failed."
            )


def _position(group: dist.ProcessGroup) -> str:
    """Return this rank's position in the sequence of operations over ``group``, or ``"broken"`` if one has failed."""
    known = list(communicators([group]))
    return "broken" if any(each.is_broken for each in known) else ",".join(str(each.launched) for each in known)


@dataclass(eq=False)
class BegunStep:
    """A step of ``optimizer``, which owns it, that ``frame`` executes, or did until an exception ended it."""

    optimizer: torch.optim.Optimizer
    frame: FrameType


_BEGUN_ATTRIBUTE = "_composable_fsdp_begun_step"
"""The attribute of optimizers with their :class:`BegunStep`. Copies and pickles do not have it."""
_begun: WeakValueDictionary[int, BegunStep] = WeakValueDictionary()
"""The steps that have begun and did not succeed, by the ``id`` of their optimizer."""
_inner_steps: WeakKeyDictionary[object, int] = WeakKeyDictionary()
"""By root, the number of steps inside of a step of the same optimizer, as that of a base class."""


def failed_steps(root: object) -> list[BegunStep]:
    """Return the steps of parameters of ``root`` that an exception has ended, and that were not repeated since."""
    ended = [step for step in list(_begun.values()) if has_ended(step.frame)] if _begun else []
    return [s for s in ended if any(root is r for r in roots_stepped_by(s.optimizer, sharded_parameters(s.optimizer)))]


def forget_step(step: BegunStep) -> None:
    """Forget ``step``, which has succeeded, or for which ranks have met."""
    vars(step.optimizer).pop(_BEGUN_ATTRIBUTE, None)


_STEP_CODE = cast(FunctionType, torch.optim.Optimizer.profile_hook_step(print)).__code__
"""The code of torch's function around the steps of all optimizers, which calls the hooks."""


def _step_frame() -> FrameType:
    """Return the frame of the optimizer step that has called a hook. Dynamo runs it with code of its own.

    In a compiled step the second hook is called by a frame for the part after a graph break, below that of the step.
    """
    frame = caller = sys._getframe(3)
    while (frame.f_code.co_name, frame.f_code.co_filename) != (_STEP_CODE.co_name, _STEP_CODE.co_filename):
        if frame.f_back is None:
            return caller
        frame = frame.f_back
    return frame


class BegunSteps(Observer):
    """Notes which steps of optimizers have begun, and not succeeded."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        outer = _begun.get(id(optimizer))  # of a class whose step calls that of its base
        if outer is None or has_ended(outer.frame):
            begun = vars(optimizer)[_BEGUN_ATTRIBUTE] = BegunStep(optimizer, _step_frame())
            _begun[id(optimizer)] = begun

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        begun = _begun.get(id(optimizer))
        if begun is not None and begun.frame is _step_frame():
            forget_step(begun)
            return
        for root in roots_stepped_by(optimizer, sharded_parameters(optimizer)):
            _inner_steps[root] = _inner_steps.get(root, 0) + 1


def _completed_steps(root: ObservedRoot) -> int:
    """Return the number of steps as the program calls them: the same on all ranks, unless one has failed."""
    return root.planner.steps.number - _inner_steps.get(root, 0)
