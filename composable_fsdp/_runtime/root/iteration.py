"""What each hook does in the current pass, and how everything in flight is brought to an end.

States: IDLE, FORWARD (from the outermost module's pre-forward to its post-forward), BACKWARD (from the first gradient
that reaches a unit to the end of autograd's run). What a hook does is a row of ``_ACTIONS``, so recomputation under
activation checkpointing (a forward inside BACKWARD) is a row too.

Invariants: outside of passes nothing is in flight. After backward every gradient that autograd left has been reduced,
or held where its unit does not synchronise, and every unit is sharded unless it asked to be kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd import Variable

from composable_fsdp._comm.communicator import AliasingCommunicator, Communicator
from composable_fsdp._consistency.order_check import OrderCheck
from composable_fsdp._memory.streams import CommStreams, Work
from composable_fsdp._runtime.groups.profiling import ask_logger, labelled
from composable_fsdp._runtime.groups.state import Accumulation, FSDPState, Round, alive
from composable_fsdp._runtime.groups.state_machine import GradientState, Key, ParameterState
from composable_fsdp._runtime.params.optimizer_steps import OptimizerSteps, sharded_steps
from composable_fsdp._runtime.root.backward_tracker import Backward
from composable_fsdp._runtime.root.error_messages import another_thread, left_by_an_exception, unseen_output
from composable_fsdp._runtime.root.forward_call import Call
from composable_fsdp._runtime.root.forward_order import ForwardOrder
from composable_fsdp._runtime.root.fusion import Company
from composable_fsdp._runtime.root.model_check import check_models
from composable_fsdp._runtime.root.passes_underway import PassesUnderway
from composable_fsdp._runtime.root.prefetch import Unsharding
from composable_fsdp._runtime.root.recovery import Meeting, disconnect, has_failed, meet, reconnect
from composable_fsdp._runtime.root.reduce_queue import Reductions
from composable_fsdp._runtime.root.root_options import check_settings
from composable_fsdp._runtime.root.unused_modules import InStep
from composable_fsdp._runtime.schedule.policy import ForwardRecord
from composable_fsdp.errors import DivergenceError, PeerError

__all__ = ["Iteration", "Pass"]


class Pass(Key):
    """Where an iteration is."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Hook(Key):
    """What called."""

    PRE_FORWARD = "pre-forward"
    POST_FORWARD = "post-forward"


class Iteration:
    """The passes of one root. ``states`` are all below it, in module order."""

    def __init__(self, root: FSDPState, states: Mapping[str, FSDPState], streams: CommStreams) -> None:
        self.root = root
        self.states = states
        self._streams = streams
        self.is_last_backward = True
        self.post_optimizer_event: Any = None
        """Recorded by the user after the optimizer's step: the first all-gather of the next forward waits for it."""
        self._pass = Pass.IDLE
        self._around_backward = Pass.IDLE
        self._outermost: FSDPState | None = None
        self._record = ForwardRecord()
        self.steps = OptimizerSteps()
        self._backward = Backward(states.values(), self.steps)
        self._steps_when_met = sharded_steps()
        """As of when ranks last met after a pass that failed."""
        self._steps_at_forward = 0
        """As of when the last forward began."""
        self._passes = PassesUnderway(root)
        self._order = ForwardOrder()
        self._thread: threading.Thread | None = None
        """Which began the pass that is under way."""
        self._are_alike = False
        """Whether all ranks have built the same, as far as it was asked."""
        axes = (pgs.axes.shard for state in states.values() for pgs in state.group.process_groups)
        self._sharing = [cast(AliasingCommunicator, c) for c in dict.fromkeys(axes) if c.aliases and c.size > 1]
        """Over which ranks may have shards or full parameters in common memory."""
        self._company = Company(root, states)
        self._unsharding = Unsharding(root, states, streams, self._company, self.steps)
        self._reductions = Reductions(states.values(), streams, self._company, self._unsharding)
        self._grad_mode = True
        """Of the outermost module's forward."""
        self._in_step: InStep | None = None
        """Set while the order of groups must not depend on what this rank runs."""
        for state in states.values():
            state.group.gradients.on_batch = _weakly(self, Iteration._batch_of_gradients, state)
            state.group.gradients.on_last = _weakly(self, Iteration._last_gradient, state)

    @property
    def streams(self) -> CommStreams:
        """Where all of it is launched. Others may be set between passes, as roots that share streams have it."""
        return self._streams

    @streams.setter
    def streams(self, streams: CommStreams) -> None:
        self.drain()
        self._streams = self._unsharding.streams = self._reductions.streams = streams

    @property
    def current_pass(self) -> Pass:
        """The pass that is under way."""
        return self._pass

    # -- what hooks call

    def check_thread(self, state: FSDPState) -> None:
        """
        Raises:
            LifecycleError: another thread is inside a pass. Both are named in the text.
        """
        thread = self._thread
        if self._pass is Pass.IDLE:
            ask_logger()
            return
        if thread is None or thread is threading.current_thread():
            return
        recomputes = torch._C._current_graph_task_id() != -1  # in a thread of autograd's, one for each device
        if self._pass is Pass.FORWARD or (self._passes.runs_backward and not recomputes):
            raise another_thread(state, thread, self._pass.value, self.root)

    @labelled("pre_forward", lambda _, state: state.name)
    def pre_forward(self, state: FSDPState) -> None:
        """A module of ``state`` is about to compute."""
        self._check_alive(state)
        if state.round is not None:
            return  # another module of its list ran before
        self._run(Hook.PRE_FORWARD, state)
        if self._pass is Pass.FORWARD:
            state.round = Round(state.module_ids)
            if state.version_check is not None and self._leads_to_backward:
                state.round.seen = state.version_check.in_forward()

    @labelled("post_forward", lambda _, state, module: state.name)
    def post_forward(self, state: FSDPState, module: nn.Module) -> Call | None:
        """``module`` of ``state`` has computed. The call to hand to the autograd hooks, where a backward may come."""
        if self._in_step is not None and self._pass is Pass.FORWARD:
            self._in_step.end(state)
        of_round = state.round or Round(())  # recomputations are no rounds: each is its own
        call = None
        if self._leads_to_backward and of_round.position < 0:
            recorded = self._pass is Pass.FORWARD and state.group.parameters
            of_round.record = self._record if recorded else ForwardRecord()
            of_round.position = of_round.record.append(state.group.name)
            if recorded:
                self._backward.count(state, self._record)
        if torch.is_grad_enabled():
            call = Call(state, of_round, is_recomputed=self._pass is Pass.BACKWARD)
        of_round.remaining.discard(id(module))
        if not of_round.remaining or state is self._outermost:
            state.round = None
            self._run(Hook.POST_FORWARD, state)
        return call

    def abort_forward(self, state: FSDPState, error: BaseException | None) -> None:
        """``state``'s forward raised: it is sharded again, and once the outermost one's has, everything is."""
        if error is not None:
            in_backward, ends_forward = self._pass is Pass.BACKWARD, state is self._outermost
            self._passes.note(error, state, in_backward=in_backward, ends_forward=ends_forward)
        if self._pass is Pass.BACKWARD:
            return
        state.round = None
        with suppress(PeerError, DivergenceError):  # what went wrong first is being raised already
            if state is self._outermost:
                self._back_to_idle()
                self._backward.forget_forward(self._record)
            else:
                state.group.reshard()

    def pre_backward(self, call: Call) -> None:
        """A gradient reached an output of ``call``."""
        if self._pass is not Pass.BACKWARD:
            self._begin_backward()
        if call.entered != self._backward.number:
            self._enter_backward(call)

    @labelled("pre_backward", lambda _, call: call.state.name)
    def _enter_backward(self, call: Call) -> None:
        state = call.state
        self._passes.reach(state)
        self._backward.enter(call)
        if state.version_check is not None and call.round.seen is not None:
            state.version_check.in_backward(call.round.seen)
        if self._in_step is not None and state.group.parameters:
            self._in_step.reach(call.round.record, call.round.position, self._backward.number, state)
        if state.unshard_in_backward:
            batches = not call.round.ends_unseen and self._sends_batches(state)
            self._unsharding.in_backward(state, call.round.record, call.round.position, sends_batches=batches)

    def post_backward(self, call: Call) -> None:
        """The gradients of ``call``'s inputs are complete, and so all that this call adds to its unit's parameters."""
        if self._pass is not Pass.BACKWARD:
            self._begin_backward()
        state = call.state
        self._backward.leave(call)
        if call.round.ends_unseen:
            return  # the last gradient or the end of backward comes later than this
        if state.open_calls <= 0 and self._in_step is None and not self._company.has_settled(state):
            self.settle_gradients(state)
        if call.round.awaited <= 0:
            for done in (state, *state.lenders):
                if done.reshard_after_backward and not done.borrowing:
                    done.group.reshard()

    def _batch_of_gradients(self, state: FSDPState) -> None:
        """All gradients of ``state``'s next batch are there: they need not wait for the rest of the group."""
        if self._pass is Pass.BACKWARD and self._sends_batches(state) and self._backward.was_seen(state):
            self._reductions.send_batch(state)

    def _sends_batches(self, state: FSDPState) -> bool:
        """Whether ``state``'s gradients go in batches now.

        They do not while ranks take turns for unused modules, in a backward within this one, or where the collectives
        of other groups may come between two runs of this one.
        """
        if not state.sends_batches or self._in_step is not None or state.runs > 1:
            return False
        return self._backward.is_outermost

    def _last_gradient(self, state: FSDPState) -> None:
        """Every trainable parameter of ``state`` has its gradient: reduction need not wait for anything else."""
        if self._pass is not Pass.BACKWARD:
            self._begin_backward()
        if not self._backward.was_seen(state):
            raise unseen_output(state)
        if state.open_calls <= 0 and state.reshard_after_backward and self._backward.is_over_for(state):
            state.group.reshard()  # first, as the reduction takes memory
        if state.accumulation is not Accumulation.UNSHARDED and self._in_step is None:
            self.settle_gradients(state)

    def _check_alike(self) -> None:
        """Once, before the first collective: ranks compare what they have built, and this one what was set on it."""
        if not self._are_alike:
            check_settings(self.root, self.states.values())
            check_models(self.root, self.states)
            self._are_alike = True

    # -- actions

    def _run(self, hook: Hook, state: FSDPState) -> None:
        for action in _ACTIONS[self._pass, hook]:
            action(self, state)

    def _begin_forward(self, state: FSDPState) -> None:
        self._pass, self._outermost, self._thread = Pass.FORWARD, state, threading.current_thread()
        self._passes.begin_forward(state)
        self._check_alike()
        if self.post_optimizer_event is not None:
            self.streams.gather.wait_event(self.post_optimizer_event)
            self.post_optimizer_event = None
        self._record = ForwardRecord()
        self._backward.forget_before_step()
        self.commit_residuals(begins_forward=True)
        self.deliver_before_changes()
        self._grad_mode = torch.is_grad_enabled()
        self._in_step = InStep(self, state) if any(u.unequal_use for u in self.states.values()) else None
        self._unsharding.begin_forward(each_alone=self._in_step is not None, leads_to_backward=self._grad_mode)

    def _unshard_in_forward(self, state: FSDPState) -> None:
        if self._in_step is not None:
            self._in_step.begin(state)
        self._unsharding.in_forward(state)

    def end_skipped(self, state: FSDPState) -> None:
        """In place of the hook after forward, for a unit that only other ranks may run."""
        if self._leads_to_backward and state.group.parameters:
            self._record.append(state.name)
        self._reshard_after_forward(state)

    def gather_in_forward(self, state: FSDPState) -> None:
        """Brings ``state`` into memory, as the hook before forward does."""
        self._unsharding.in_forward(state)

    @property
    def _leads_to_backward(self) -> bool:
        """Whether a backward may come to what runs now. In step, all ranks must find the same."""
        in_step = self._in_step is not None and self._pass is Pass.FORWARD
        return self._grad_mode if in_step else torch.is_grad_enabled()

    def _unshard_for_recomputation(self, state: FSDPState) -> None:
        if self._in_step is not None:
            self._in_step.check_recomputed(state)
        self._unsharding.for_recomputation(state)

    def gather_in_backward(self, state: FSDPState, record: ForwardRecord, position: int) -> None:
        """Brings ``state``, which ended its forward at ``position``, into memory in step with other ranks."""
        self._unsharding.in_backward(state, record, position, sends_batches=False)

    def _reshard_after_forward(self, state: FSDPState) -> None:
        self._unsharding.after_forward(state, leads_to_backward=self._leads_to_backward)

    def _end_forward_if_outermost(self, state: FSDPState) -> None:
        if state is not self._outermost:
            return
        if self._in_step is not None:
            self._in_step.end_forward()
        self._pass, self._outermost = Pass.IDLE, None
        self._passes.end()
        if state is self.root and self.root.order_check is not OrderCheck.OFF:
            self._order.compare(self._record.ended)
        for other in self.states.values():
            if other.round is not None:  # some modules of its list did not run
                other.round = None
                self._reshard_after_forward(other)
        self._unsharding.end_forward()
        if self._sharing:
            self._part_after_forward()

    def _begin_backward(self) -> None:
        ask_logger()
        self._around_backward, self._pass = self._pass, Pass.BACKWARD
        self._thread = threading.current_thread()
        self._backward.begin()
        self.deliver_before_changes()
        Variable._execution_engine.queue_callback(self._passes.begin_backward(self.end_backward))
        self._reductions.begin_backward()

    @labelled("root_post_backward_callback", lambda self: self.root.name)
    def end_backward(self) -> None:
        """What is left to do in a backward, or in several of which each left its gradients for the last one."""
        if self._in_step is not None:
            self._in_step.end_backward(self._backward.number)
        self._backward.end()
        self._unsharding.end_backward()
        self._company.forget_settled()
        for state in self.states.values():
            state.open_calls = 0
            if state.group.gradients.are_held:
                self.settle_gradients(state, at_end=True)
            if state.accumulation is Accumulation.UNSHARDED:
                state.group.gradients.note_sums()
            if state.group.parameter_state is ParameterState.SHARDED:
                continue
            if state.reshard_after_backward:
                state.group.reshard()
            else:
                state.note_kept(self._unsharding.seen_steps)
                state.group.copy_out_shared()  # other ranks may step their shards while forwards here still use it
        # Before waiting for gradients, so as to wait only once.
        leaving = self._leave_shards("end of backward", self._sharing)
        if self.is_last_backward:
            self.drain()
            for state in self.states.values():
                if state.client_post_backward is not None:
                    state.client_post_backward(_nothing)  # only now it finds the reduced gradients
        _wait_for(leaving)
        self._passes.end_backward()
        self._pass, self._around_backward = self._around_backward, Pass.IDLE

    def _leave_shards(self, occasion: str, awaited: Container[Communicator]) -> list[Work]:
        """This rank reads nothing that others wrote to common memory until the next gather. Once the works are done
        none does, so that each may write there.

        Args:
            occasion: what errors call it.
            awaited: over which ranks have read since they last met. Where they have not, they need not meet.
        """
        works = [communicator.part(occasion) for communicator in self._sharing if communicator in awaited]
        for state in self.states.values() if works else ():
            state.group.has_parted()
        return works

    def _part_after_forward(self) -> None:
        process_groups = (pgs for state in self.states.values() for pgs in state.group.process_groups)
        awaited = {pgs.axes.shard for pgs in process_groups if pgs.awaits_parting}
        if not self._leads_to_backward:  # what stays may be used in forwards that other ranks do not run
            for state in self.states.values():
                state.group.copy_out_shared()
            if not self._unsharding.is_common:  # neither may they run this one
                return
        _wait_for(self._leave_shards("end of forward", awaited))

    def gather_by_hand(self, state: FSDPState) -> bool:
        """Launches the gather of ``state``, which is to stay. Whether it was not in memory or on its way before."""
        self._check_alike()
        return self._unsharding.gather_by_hand(state)

    def keep_unsharded(self, state: FSDPState) -> None:
        """``state`` was gathered by hand, and stays for forwards of which other ranks may run fewer."""
        awaited = dict.fromkeys(c.axes.shard for c in state.group.process_groups if c.awaits_parting)
        if state.group.parameter_state is ParameterState.UNSHARDED and awaited:
            state.group.copy_out_shared()
            _wait_for([cast(AliasingCommunicator, c).barrier(f"unshard() of {state.name}") for c in awaited])
            state.group.has_parted()

    def settle_gradients(self, state: FSDPState, *, at_end: bool = False, contributes: bool = False) -> None:
        """Sends the gradients that autograd left on ``state``, or holds them where it does not synchronise.

        At the end of backward, also what earlier backwards left partly reduced. With ``contributes``, zeros where there
        are none.
        """
        gradients = state.group.gradients
        if contributes and state.accumulation is not Accumulation.UNSHARDED:
            gradients.contribute()
        is_local = gradients.state is GradientState.LOCAL
        if not is_local and not (at_end and gradients.state is GradientState.PARTIAL and not state.keeps_partial):
            return
        if gradients.is_new and not self._backward.was_seen(state):  # those held since an earlier backward are right
            raise unseen_output(state)
        alone = self._in_step is not None
        if state.client_post_backward is None:
            self._reductions.send(state, at_end=at_end, alone=alone)
        else:
            state.client_post_backward(functools.partial(self._reductions.send, state, at_end=at_end, alone=alone))

    # -- endings

    def drain(self) -> None:
        """Completes everything in flight: afterwards all reduced gradients are set."""
        self._reductions.drain()

    def deliver_before_changes(self) -> None:
        """Completes what is in flight where parameters were frozen or thawed since it was launched: what comes lies as
        the plan has it that counted then.
        """
        if self._reductions.are_in_flight and any(
            p.was_flipped for u in self.states.values() for p in u.group.parameters
        ):
            self.drain()

    def commit_residuals(self, *, begins_forward: bool = False) -> None:
        """Makes final what codecs with error feedback remember, if the step in which they changed it has ended.

        It has where an optimizer has stepped since, or something else has changed the shards. Before a forward, it also
        has where no gradient is left: they were used or dropped.
        """
        steps = self.steps.number
        changed = [each for u in self.states.values() if (each := u.group.gradients).version_before_step is not None]
        if changed:
            has_ended = steps != self._steps_at_forward or any(each.shards_changed for each in changed)
            if not has_ended and begins_forward:
                has_ended = not self._reductions.are_in_flight and not any(each.are_waiting for each in changed)
            if has_ended:
                for each in changed:
                    each.commit_residuals()
        if begins_forward:
            self._steps_at_forward = steps

    def reset(self) -> None:
        """Back to IDLE from anywhere: completes reductions, shards everything, drops gradients not yet reduced. What
        codecs with error feedback remember is again as it was before the step.

        After a pass that failed, on this rank or another, all ranks must come here. Where they were not at the same
        place, what is in flight is not waited for, and they connect to each other anew.

        Raises:
            PeerError: some ranks did not come, or cannot be reached any more.
            DivergenceError: some took an optimizer step in between and others did not. It comes last: once they all
                have the same parameters, they can go on.
        """
        states = self.states.values()
        meeting, failed = Meeting(), has_failed(states)
        if failed:
            meeting = meet(states, sharded_steps() - self._steps_when_met)
            self._steps_when_met = sharded_steps()
        if not meeting.is_together:
            disconnect(states)
            self._reductions.abandon()
            for state in states:
                state.group.abandon()
            reconnect(states)
        self.drain()
        self.commit_residuals()  # of the step before, where this rank failed between the two
        for state in states:
            state.group.gradients.drop()
            if state.group.gradients.version_before_step is not None:
                state.group.gradients.roll_back_residuals()
        self._back_to_idle()
        if failed:  # so ranks have met, and may have gathered different groups before
            for state in states:
                state.group.has_parted()
        self._backward.forget_forwards()
        meeting.check_steps()

    def _back_to_idle(self) -> None:
        for state in self.states.values():
            state.group.reshard()
            state.open_calls, state.kept_version, state.round = 0, None, None
        self._backward.forget()
        self._unsharding.end_backward()
        self._company.forget_settled()
        if self._in_step is not None:
            self._in_step.forget_backward()
        self._passes.end()
        self._pass, self._around_backward, self._outermost = Pass.IDLE, Pass.IDLE, None

    def may_come_back_to(self, state: FSDPState) -> bool:
        """Whether a backward may come to a forward that has used parameters of ``state``."""
        self._backward.forget_before_step()
        return any(each.runs for each in (state, *alive(state.borrowing)))

    def was_reached(self, state: FSDPState) -> bool:
        """Whether the last backward came to ``state`` through an output that its hooks saw."""
        return self._backward.was_reached(state)

    def _check_alive(self, state: FSDPState) -> None:
        """Tells when an earlier pass ended in an exception that nobody recovered from."""
        died = (self._pass is Pass.BACKWARD and torch._C._current_graph_task_id() == -1) or (
            self._pass is Pass.FORWARD and state is self._outermost
        )
        if died:
            raise left_by_an_exception(state, self._pass.value, self.root)


_ACTIONS: Mapping[tuple[Pass, Hook], tuple[Callable[[Iteration, FSDPState], None], ...]] = {
    (Pass.IDLE, Hook.PRE_FORWARD): (Iteration._begin_forward, Iteration._unshard_in_forward),
    (Pass.FORWARD, Hook.PRE_FORWARD): (Iteration._unshard_in_forward,),
    (Pass.BACKWARD, Hook.PRE_FORWARD): (Iteration._unshard_for_recomputation,),
    (Pass.FORWARD, Hook.POST_FORWARD): (Iteration._reshard_after_forward, Iteration._end_forward_if_outermost),
    (Pass.BACKWARD, Hook.POST_FORWARD): (),  # the backward that asked for recomputation still needs the parameters
}


def _wait_for(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def _nothing() -> None:
    pass


def _weakly(
    iteration: Iteration, method: Callable[[Iteration, FSDPState], None], state: FSDPState
) -> Callable[[], None]:
    """``method`` of both, without owning them: the iteration owns the unit, and the unit what calls this."""
    weak_iteration, weak_state = ref(iteration), ref(state)

    def call() -> None:
        alive, its_state = weak_iteration(), weak_state()
        if alive is not None and its_state is not None:
            method(alive, its_state)

    return call
