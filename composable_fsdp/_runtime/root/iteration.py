"""The iteration of one root module: the action of each hook in the current pass, and the end of each pass.

States: IDLE; FORWARD, from the outermost module's pre-forward to its post-forward; BACKWARD, from the first gradient
that reaches an FSDP state to the end of the autograd run. The actions of a hook are a row of ``ACTIONS_OF_HOOKS``.
Recomputation under activation checkpointing is a forward inside BACKWARD, so it is a row too.

Invariants: nothing is in flight outside of passes, except reductions if the last backward does not wait. After
backward, every gradient from autograd is reduced, or held if gradient synchronization is off. Every parameter group is
sharded unless it was asked to stay unsharded.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd import Variable

from composable_fsdp._comm.communicator import AliasingCommunicator, barrier
from composable_fsdp._memory.streams import CommStreams, Work
from composable_fsdp._runtime.groups.callers_context import (
    dispatch_modes,
    function_modes,
    in_autocast,
    in_transform,
    runs_outside,
)
from composable_fsdp._runtime.groups.param_group import ParamGroup
from composable_fsdp._runtime.groups.state import Accumulation, ForwardCall, FSDPState, alive
from composable_fsdp._runtime.groups.state_machine import (
    HELD_GRADIENTS,
    LOCAL_GRADIENTS,
    GradientState,
    ParameterState,
    Pass,
)
from composable_fsdp._runtime.params.optimizer_steps import OptimizerSteps
from composable_fsdp._runtime.root.error_messages import another_thread, left_by_an_exception, unseen_output
from composable_fsdp._runtime.root.finalization import Finalization
from composable_fsdp._runtime.root.observer import OBSERVERS, Events
from composable_fsdp._runtime.root.passes_underway import Backward, PassesUnderway
from composable_fsdp._runtime.root.reduce_queue import ReductionQueue
from composable_fsdp._runtime.root.root_options import check_settings
from composable_fsdp._runtime.root.schedule_runner import ScheduleRunner
from composable_fsdp._runtime.root.unused_modules import UnusedModules
from composable_fsdp._runtime.schedule.forward_record import ForwardRecord
from composable_fsdp._runtime.schedule.schedule import Hook, Schedule
from composable_fsdp.errors import DivergenceError, LifecycleError, PeerError

__all__ = ["ACTIONS_OF_HOOKS", "Iteration", "known_iterations"]

# Up to Python 3.11, a member takes as long as a call to look up on its enum, so each group and step looks up these.
_IDLE, _BACKWARD, _UNSHARDED = Pass.IDLE, Pass.BACKWARD, Accumulation.UNSHARDED
_ARRIVING, _SHARDED = GradientState.ARRIVING, ParameterState.SHARDED
_PRE_FORWARD, _POST_FORWARD = Hook.PRE_FORWARD, Hook.POST_FORWARD
_PRE_BACKWARD, _POST_BACKWARD = Hook.PRE_BACKWARD, Hook.POST_BACKWARD


class Iteration:
    """The executor of the passes of one root. ``states`` are all FSDP states below it, in module order."""

    def __init__(self, root: FSDPState, states: Mapping[str, FSDPState], streams: CommStreams) -> None:
        self.root = root
        self.states = states
        self._streams = streams
        self.finalization = Finalization()
        self.post_optimizer_event: Any = None
        """Event that the user recorded after the optimizer step; the next forward's first all-gather waits for it."""
        self._pass = Pass.IDLE
        self._outermost: FSDPState | None = None
        steps = OptimizerSteps()
        self._backward = Backward(states.values(), steps)
        self._passes = PassesUnderway()
        self._is_verified = False
        """True once the observers have compared the model between ranks."""
        self.lent: ParamGroup | None = None
        """A group in LENT, while there is one: no module of this root may run."""
        axes = (pgs.axes.shard for state in states.values() for pgs in state.group.process_groups)
        self._aliasing = [cast(AliasingCommunicator, c) for c in dict.fromkeys(axes) if c.traits.aliases and c.size > 1]
        """Shard-axis communicators over which shards or unsharded buffers may be in memory shared between ranks."""
        self.runner = ScheduleRunner(root, states, streams, steps)
        self._reductions = ReductionQueue(streams, self.runner)
        self._unused_modules: UnusedModules | None = None
        """Set while the order of groups must not depend on which modules this rank runs."""
        for state in states.values():
            state.group.gradients.on_ready = _weak_callback(self, Hook.GRAD_READY, state)
        self.events = Events(self, OBSERVERS)
        """The attachments that are told of the events of this root."""
        _register(self)

    @property
    def streams(self) -> CommStreams:
        """The streams for all launches. May be replaced between passes, because roots can share streams."""
        return self._streams

    @streams.setter
    def streams(self, streams: CommStreams) -> None:
        self.drain()
        self._streams = self.runner.streams = self._reductions.streams = streams

    @property
    def current_pass(self) -> Pass:
        """The current pass."""
        return self._pass

    # -- entry points of hooks

    def check_thread(self, state: FSDPState) -> None:
        """Raise an error if another thread is inside a pass, or full parameters are registered for the user.

        Raises:
            LifecycleError: another thread is inside a pass, and the text names both threads; or a group is LENT.
        """
        if self.lent is not None:
            self.check_not_lent()
        thread = self._passes.thread
        if self._pass is _IDLE or thread is None or thread is threading.current_thread():
            return
        recomputes = torch._C._current_graph_task_id() != -1  # autograd has one thread for each device
        if self._pass is Pass.FORWARD or (self._passes.runs_backward and not recomputes):
            raise another_thread(state, thread, self._pass.value, self.root)

    def check_not_lent(self) -> None:
        """Raise a ``LifecycleError`` if a group is LENT."""
        if self.lent is not None:
            self.lent.check_can_unshard()

    def pre_forward(self, state: FSDPState) -> None:
        """Run the actions for the pre-forward of a module of ``state``."""
        if state is self._outermost or self._pass is _BACKWARD:
            self._check_alive(state)
        if state.run is None:  # else another module of the same group ran before
            self._run(_PRE_FORWARD, state)

    def post_forward(self, call: ForwardCall, module: nn.Module) -> bool:
        """Run the actions for the post-forward of ``module``. Return whether a backward may come back to ``call``."""
        run = call.state.run or call  # each recomputation is a run of its own
        if run is not call:
            call.first = run
        if run.remaining:
            run.remaining.discard(id(module))
        has_grad = torch.is_grad_enabled()
        if has_grad:
            call.is_recomputed = self._pass is _BACKWARD
        self._run(_POST_FORWARD, call)
        if has_grad and run.position < 0:  # not in the record of a forward: backward serves it eagerly
            run.record, run.position = ForwardRecord(), 0
        return has_grad

    @runs_outside
    def abort_forward(self, state: FSDPState, error: BaseException | None) -> None:
        """Reshard ``state``, whose forward raised. Return to IDLE if it is the outermost one."""
        if error is not None:
            in_backward, ends_forward = self._pass is Pass.BACKWARD, state is self._outermost
            self._passes.note(self, error, state, in_backward=in_backward, ends_forward=ends_forward)
        if self._pass is Pass.BACKWARD:
            return
        if state.run is not None and not state.run.is_recorded:
            self.runner.record.abort(state.group.pre_forward_event)
        state.run = None
        with suppress(PeerError, DivergenceError):  # the original error is being raised already
            if state is self._outermost:
                self._back_to_idle()
                self._backward.forget_forward(self.runner.record)
            else:
                state.group.reshard()

    def pre_backward(self, call: ForwardCall) -> None:
        """Run the actions for the pre-backward of ``call``: a gradient reached one of its outputs."""
        if self._pass is _BACKWARD and call.entered == self._backward.number:
            return  # one reached another output before
        self._run(_PRE_BACKWARD, call)

    def post_backward(self, call: ForwardCall) -> None:
        """Run the actions for the post-backward of ``call``.

        The gradients of its inputs and of its use of the parameters are complete.
        """
        self._run(_POST_BACKWARD, call)

    def end_backward(self) -> None:
        """Run the actions for the end of the autograd run."""
        self._run(Hook.END_BACKWARD, self.root)

    def _verify_ranks(self) -> None:
        """Check the settings, and let observers compare the model across ranks, once, before the first collective."""
        if not self._is_verified:
            check_settings(self.root, self.states.values())
            for state in self.states.values():
                state.group.check_grad_dtypes()
            for observe in self.events.before_first_collective:
                observe(self)
            self._is_verified = True

    # -- actions

    def _run(self, hook: Hook, subject: Any) -> None:
        if self._pass is _IDLE:
            for observe in self.events.before_first_hook:
                observe(self)
        is_outside = not (dispatch_modes() or function_modes() or in_transform() or in_autocast())
        actions = ACTIONS_OF_HOOKS[self._pass, hook]
        if is_outside and not self.events.before_hook and "spmd_types" not in sys.modules:
            for action in actions:
                action(self, subject)
        else:
            self._run_observed(hook, subject, actions)

    @runs_outside
    def _run_observed(self, hook: Hook, subject: Any, actions: Iterable[Callable[[Iteration, Any], None]]) -> None:
        """Run ``actions`` outside of the caller's context, and tell observers of it."""
        for observe in self.events.before_hook:
            observe(self, hook, subject)
        try:
            for action in actions:
                action(self, subject)
        finally:
            for observe in self.events.after_hook:
                observe(self, hook, subject)

    @property
    def evaluates(self) -> bool:
        """True in a forward to which no backward comes back."""
        return self._pass is Pass.FORWARD and not self.runner.leads_to_backward

    def _begin_forward(self, state: FSDPState) -> None:
        self._pass, self._outermost = Pass.FORWARD, state
        self._passes.begin_forward(self, state.calls_under_way[-1])
        self._verify_ranks()
        if self.post_optimizer_event is not None:
            self.streams.gather.wait_event(self.post_optimizer_event)
            self.post_optimizer_event = None
        self._backward.forget_before_step()
        self.drain_before_changes()
        for observe in self.events.begin_forward:
            observe(self, state)
        unequal_use = any(u.unequal_use for u in self.states.values())
        self._unused_modules = UnusedModules(self, state) if unequal_use else None
        self.runner.begin_forward(unequal_use=unequal_use, leads_to_backward=torch.is_grad_enabled())

    def _unshard_in_forward(self, state: FSDPState) -> None:
        if self._unused_modules is not None:
            self._unused_modules.begin(state)
        call = state.calls_under_way[-1]
        call.after = self.runner.in_forward(state)
        if len(state.module_ids) > 1:
            call.remaining = set(state.module_ids)
        state.run = call
        for observe in self.events.enter_forward:
            observe(self, call)

    def _end_run(self, call: ForwardCall) -> None:
        """Record the end of the first module in a run. After the last one perform the scheduled actions.

        After the outermost one end the forward.
        """
        state, run, leads_to_backward = call.state, call.first or call, torch.is_grad_enabled()
        if self._unused_modules is not None:
            leads_to_backward = self.leads_to_backward
            self._unused_modules.end(state)
        if not run.is_recorded:
            run.is_recorded = True
            comes_back = leads_to_backward and bool(state.group.tensors.parameters)
            run.position = self.runner.record.end(state.group.post_forward_event, leads_to_backward=comes_back)
            if run.position >= 0:
                run.record = self.runner.record
                self._backward.count(state, self.runner.record)
        is_outermost = state is self._outermost
        if run.remaining and not is_outermost:
            return
        state.run = None
        registration = state.group.tensors.registration
        if registration.keeps_given and registration.was_unsharded:
            state.note_kept(self.runner.seen_steps)  # functional_call will register the unsharded parameters again
        else:
            self.runner.after_forward(state, run.after, leads_to_backward=leads_to_backward)
            if registration.keeps_given:
                state.group.reshard()
        if is_outermost:
            self._run(Hook.END_FORWARD, state)

    def end_skipped(self, state: FSDPState) -> None:
        """Do the work of the post-forward hook for a state that only other ranks may run."""
        leads_to_backward = self.leads_to_backward
        comes_back = leads_to_backward and bool(state.group.tensors.parameters)
        self.runner.record.end(state.group.post_forward_event, leads_to_backward=comes_back)
        self.runner.after_forward(state, None, leads_to_backward=leads_to_backward)

    def begin_skipped(self, state: FSDPState) -> None:
        """Unshard ``state``, as the pre-forward hook does."""
        self.runner.in_forward(state)

    @property
    def leads_to_backward(self) -> bool:
        """True if a backward may follow the running forward. Ranks with unused modules must all get the same value."""
        unequal_use = self._unused_modules is not None and self._pass is Pass.FORWARD
        return self.runner.leads_to_backward if unequal_use else torch.is_grad_enabled()

    def _unshard_for_recomputation(self, state: FSDPState) -> None:
        if self._unused_modules is not None:
            self._unused_modules.check_recomputed(state)
        self.runner.for_recomputation(state)

    def reach_skipped(self, state: FSDPState, record: ForwardRecord, position: int) -> None:
        """Do the work of the pre-backward hook for ``state``, which ended its forward at ``position`` of ``record``."""
        self._backward.reached.add(state)
        if state.unshard_in_backward:
            self.runner.in_backward(state, record, position)

    def _end_forward(self, outermost: FSDPState) -> None:
        if self._unused_modules is not None:
            self._unused_modules.end_forward()
        self._pass, self._outermost = Pass.IDLE, None
        self._passes.end(self, succeeded=True)
        for other in self.states.values():
            if other.run is not None:  # some modules of the group did not run
                other.run = None
                self.runner.after_forward(other, None, leads_to_backward=self.leads_to_backward)
        self.runner.end_forward()

    def _begin_backward(self, _: object) -> None:
        self.check_not_lent()
        self._backward.begin(is_in_forward=self._pass is Pass.FORWARD)
        self._pass = Pass.BACKWARD
        self.drain_before_changes()
        Variable._execution_engine.queue_callback(self._passes.begin_backward(self))
        self.runner.begin_backward()
        self._reductions.begin_backward()
        for state in self.states.values():
            if state.group.gradients.were_summed:
                state.group.gradients.hold_set()

    def _enter_backward(self, call: ForwardCall) -> None:
        """Unshard the group of ``call``."""
        state, run = call.state, call.first or call
        self._passes.reach(self, state)
        self._backward.enter(call)
        if call.is_recomputed and self._reductions.is_waiting(state):
            self.reduce_gradients(state)  # before a backward inside this one adds to them
        for observe in self.events.enter_backward:
            observe(self, call)
        if self._unused_modules is not None and state.group.parameters:
            self._unused_modules.reach(run.record, run.position, self._backward.number, state)
        if state.unshard_in_backward:
            self.runner.in_backward(state, run.record, run.position)

    def _leave_backward(self, call: ForwardCall) -> None:
        """Reduce the gradients of the group of ``call`` and reshard it, unless another call still needs it."""
        state, run = call.state, call.first or call
        self._backward.leave(call)
        if run.ends_unseen:
            return  # the hook for the last gradient, or for the end of backward, comes later
        if run.awaited <= 0:  # first, because the reduction allocates memory
            for done in (state, *state.owner_states):
                if done.reshard_after_backward and not done.user_states:
                    done.group.reshard()
        if state.open_calls <= 0 and self._unused_modules is None and not self._reductions.is_waiting(state):
            self.reduce_gradients(state)

    def _reduce_ready(self, state: FSDPState) -> None:
        """Reduce the gradients of ``state`` that are ready: the next gradient bucket, or all that are left."""
        was_seen = self._backward.was_seen(state)
        if state.group.gradients.state is _ARRIVING:
            if was_seen and self._reduces_grad_buckets(state):
                self._reductions.reduce_grad_bucket(state)
            return
        if not was_seen:
            raise unseen_output(state)
        if self._is_reduced_after_backward(state):
            return
        if state.open_calls <= 0 and state.reshard_after_backward and self._backward.is_over_for(state):
            state.group.reshard()  # first, because the reduction allocates memory
        if state.accumulation is not _UNSHARDED and self._unused_modules is None:
            self.reduce_gradients(state)

    def _is_reduced_after_backward(self, state: FSDPState) -> bool:
        """Return whether the post-backward hook of ``state`` will reduce its gradients, which are complete."""
        if state.open_calls <= 0 or not self._streams.device.has_streams or not state.frees_before_reduction:
            return False
        return not self._reduces_grad_buckets(state)

    def _reduces_grad_buckets(self, state: FSDPState) -> bool:
        """Return whether ``state`` now reduces its gradients in buckets.

        It does not while ranks join the collectives of unused modules, in a backward inside this one, or where
        collectives of other groups may come between two runs of this one.
        """
        if not state.reduces_grad_buckets or self._unused_modules is not None or state.runs > 1:
            return False
        return self._backward.is_outermost

    def _end_backward(self, _: object) -> None:
        """Complete a backward: reduce what is left, reshard, and wait if this is the last backward of the step."""
        if self._unused_modules is not None:
            self._unused_modules.end_backward(self._backward.number)
        self._backward.end()
        self._reductions.clear_waiting()
        for state in self.states.values():
            state.open_calls = 0
            if state.group.gradients.sums_are_in_flight and not state.keeps_partial:
                self.drain()  # this backward did not use the group, which holds the sums only then
            if state.group.gradients.state in HELD_GRADIENTS:
                self.reduce_gradients(state, at_end=True)
            if state.accumulation is _UNSHARDED:
                state.group.gradients.note_sums()
            if state.group.parameter_state is _SHARDED:
                continue
            if state.reshard_after_backward:
                state.group.reshard()
            else:
                state.note_kept(self.runner.seen_steps)
                state.group.copy_out_shared()  # other ranks may update their shards while forwards here still use it
        # Launched before the wait for gradients, so that there is one wait.
        works = self._end_epoch("end of backward", self._aliasing)
        self.finalization.end_backward()
        if self._waits_after_backward:
            self.finish_reductions()
        _wait_for(works)
        self._passes.end_backward(self)
        self._pass = Pass.FORWARD if self._backward.is_in_forward else Pass.IDLE

    def _end_epoch(self, occasion: str, awaited: Container[AliasingCommunicator]) -> list[Work]:
        """Launch the end of the epoch of shared memory: this rank reads nothing in it until the next all-gather.

        Once the returned works are done, no rank reads there, and each may write.

        Args:
            occasion: name of the event in errors.
            awaited: communicators over which ranks have read since the epoch began. The others need no synchronization.
        """
        works = [barrier(c, occasion, ends_epoch=True) for c in self._aliasing if c in awaited]
        for state in self.states.values() if works else ():
            state.group.note_epoch_end()
        return works

    def _end_epoch_after_forward(self, _: object) -> None:
        if not self._aliasing or not self.runner.runs_on_all_ranks:
            return  # a forward that gathered nothing must not change what ranks do together
        if not self.leads_to_backward:  # kept parameters may be used in forwards that other ranks do not run
            for state in self.states.values():
                state.group.copy_out_shared()
        _wait_for(self._end_epoch("end of forward", self._awaited))

    @property
    def _awaited(self) -> set[AliasingCommunicator]:
        """The axes over which ranks may read shared memory: the same on every rank."""
        process_groups = (pgs for state in self.states.values() for pgs in state.group.process_groups)
        return {cast(AliasingCommunicator, pgs.axes.shard) for pgs in process_groups if pgs.awaits_epoch_end}

    @property
    def awaits_readers(self) -> bool:
        """True between passes if any rank may read shared memory: a forward kept parameters, and no backward came."""
        return bool(self._aliasing) and self._pass is Pass.IDLE and bool(self._awaited)

    def has_shards_in(self, storages: Container[int]) -> bool:
        """Return whether any shard is in one of ``storages``, the C addresses of ``torch.UntypedStorage``."""
        buckets = (bucket for state in self.states.values() for bucket in state.group.tensors.buckets)
        return any(tensor.untyped_storage()._cdata in storages for bucket in buckets for tensor in bucket.versioned)

    def wait_for_readers(self) -> None:
        """Wait until no rank reads shared memory, which an optimizer will write."""
        _wait_for(self._end_epoch("optimizer step", self._awaited))

    def unshard_explicitly(self, state: FSDPState) -> None:
        """Launch the all-gather of ``state``, which stays unsharded.

        Parameters in shared memory are copied to memory of this rank at once: other ranks may change their shards, and
        may not run the forwards that use the copy.
        """
        for observe in self.events.before_first_hook:
            observe(self)
        self._verify_ranks()
        is_new = self.runner.unshard_explicitly(state)
        shared = dict.fromkeys(pgs.axes.shard for pgs in state.group.process_groups if pgs.awaits_epoch_end)
        awaited = [cast(AliasingCommunicator, communicator) for communicator in shared]
        if is_new and awaited:
            state.group.copy_out_shared()
            _wait_for([barrier(c, f"unshard() of {state.name}", ends_epoch=False) for c in awaited])
            state.group.note_epoch_end()

    def schedule(self) -> Schedule:
        """Return the schedule of the next iteration that trains."""
        return self.runner.expected(is_last_backward=self._waits_after_backward, has_barriers=bool(self._aliasing))

    def reduce_gradients(self, state: FSDPState, *, at_end: bool = False, contributes: bool = False) -> None:
        """Reduce the gradients that autograd left on ``state``, or hold them if gradient synchronization is off.

        ``at_end`` of backward, also reduce what earlier backwards left partly reduced. With ``contributes``, reduce
        zeros for parameters without a gradient.
        """
        gradients = state.group.gradients
        if contributes and state.accumulation is not _UNSHARDED:
            gradients.contribute()
        is_local = gradients.state in LOCAL_GRADIENTS
        if not is_local and not (at_end and gradients.state is GradientState.PARTIAL and not state.keeps_partial):
            return
        if gradients.state is _ARRIVING and not self._backward.was_seen(state):
            raise unseen_output(state)
        alone = self._unused_modules is not None
        if state.client.post_backward is None:
            self._reductions.send(state, at_end=at_end, alone=alone)
        else:
            state.client.post_backward(functools.partial(self._reductions.send, state, at_end=at_end, alone=alone))

    # -- endings

    def drain(self) -> None:
        """Wait for everything in flight. Afterwards all reduced gradients are set."""
        self._reductions.drain()

    def finish_reductions(self) -> None:
        """Wait for all reductions in flight, set their gradients, and tell clients so."""
        self.drain()
        for state in self.states.values():
            if state.client.post_backward is not None:
                state.client.post_backward(_noop)  # only now the reduced gradients are set

    def reduce_held(self, occasion: str, states: Iterable[FSDPState]) -> None:
        """Launch the reductions of all gradients that ``states`` hold after earlier backwards.

        Raises:
            LifecycleError: a forward or backward runs.
        """
        if self._pass is not Pass.IDLE:
            place = f"the {self._pass.value} of {self.root.name}"
            raise LifecycleError(
                f"{occasion} was called in {place}, which may still give gradients: call it afterwards."
            )
        self.check_not_lent()
        self._reductions.reduce_held(states)

    @property
    def _waits_after_backward(self) -> bool:
        """True if the next backward waits at its end for all reductions."""
        return self.finalization.is_last_backward and not self.finalization.is_manual

    def drain_before_changes(self) -> None:
        """Wait for reductions in flight if ``requires_grad`` of a parameter changed since their launch.

        Their outputs have the layout of the plan at the time of the launch.
        """
        if self._reductions.are_in_flight and any(
            p.was_flipped for u in self.states.values() for p in u.group.parameters
        ):
            self.drain()

    def reset(self) -> None:
        """Return to IDLE from any state.

        Complete reductions, reshard everything, drop gradients that are not yet reduced, and restore the residuals of
        codecs with error feedback. After a pass that failed on any rank, all ranks must call it. If they stopped at
        different places, the work in flight is abandoned and the ranks reconnect.

        Raises:
            PeerError: some ranks did not call it, or cannot be reached any more.
            DivergenceError: some ranks took an optimizer step that others did not. Raised last: once all ranks have the
                same parameters, they can go on.
        """
        states = self.states.values()
        failed = False
        for observe in self.events.reset:
            failed |= observe(self)
        self.drain()
        for state in states:
            state.group.gradients.drop()
        self._back_to_idle()
        if failed:  # the ranks have met, which ended the epoch, and may have gathered different groups
            for state in states:
                state.group.note_epoch_end()
            self.runner.forget_order()
        self._backward.forget_forwards()
        for observe in self.events.after_reset:
            observe(self)

    def abandon(self) -> None:
        """Give up the work in flight, which will not complete. Nothing may write to its memory any more."""
        for stream in (self._streams.gather, self._streams.reduce, self._streams.replicate):
            stream.join()  # copies on it may still use buffers, which are freed without a wait
        self._reductions.abandon()
        for state in self.states.values():
            state.group.abandon()

    @property
    def reductions_are_in_flight(self) -> bool:
        """True while gradients are being reduced."""
        return self._reductions.are_in_flight

    def _back_to_idle(self) -> None:
        for state in self.states.values():
            state.group.reshard()
            state.open_calls, state.kept, state.run = 0, None, None
        self._backward.forget()
        self._reductions.clear_waiting()
        if self._unused_modules is not None:
            self._unused_modules.forget_backward()
        self._passes.end(self)
        self._pass, self._outermost, self._backward.is_in_forward = Pass.IDLE, None, False
        self.finalization.forget()

    def may_come_back_to(self, state: FSDPState) -> bool:
        """Return whether a backward may follow a forward that has used parameters of ``state``."""
        self._backward.forget_before_step()
        return any(each.runs for each in (state, *alive(state.user_states)))

    def was_reached(self, state: FSDPState) -> bool:
        """Return whether the last backward reached ``state`` through an output that its hooks saw."""
        return state in self._backward.reached

    def _check_alive(self, state: FSDPState) -> None:
        """Raise an error if an earlier pass ended in an exception without recovery."""
        died = (self._pass is Pass.BACKWARD and torch._C._current_graph_task_id() == -1) or (
            self._pass is Pass.FORWARD and state is self._outermost
        )
        if died:
            raise left_by_an_exception(state, self._pass.value, self.root)


_I, _P = Iteration, Pass
ACTIONS_OF_HOOKS: Mapping[tuple[Pass, Hook], tuple[Callable[[Iteration, Any], None], ...]] = {
    (_P.IDLE, Hook.PRE_FORWARD): (_I._begin_forward, _I._unshard_in_forward),
    (_P.FORWARD, Hook.PRE_FORWARD): (_I._unshard_in_forward,),
    (_P.BACKWARD, Hook.PRE_FORWARD): (_I._unshard_for_recomputation,),
    (_P.FORWARD, Hook.POST_FORWARD): (_I._end_run,),
    (_P.BACKWARD, Hook.POST_FORWARD): (),  # the backward that asked for recomputation still needs the parameters
    (_P.FORWARD, Hook.END_FORWARD): (_I._end_forward, _I._end_epoch_after_forward),
    (_P.IDLE, Hook.PRE_BACKWARD): (_I._begin_backward, _I._enter_backward),
    (_P.FORWARD, Hook.PRE_BACKWARD): (_I._begin_backward, _I._enter_backward),  # a backward inside a forward
    (_P.BACKWARD, Hook.PRE_BACKWARD): (_I._enter_backward,),
    (_P.IDLE, Hook.GRAD_READY): (_I._begin_backward, _I._reduce_ready),  # no hook saw an output of the module
    (_P.FORWARD, Hook.GRAD_READY): (_I._begin_backward, _I._reduce_ready),
    (_P.BACKWARD, Hook.GRAD_READY): (_I._reduce_ready,),
    (_P.IDLE, Hook.POST_BACKWARD): (_I._begin_backward, _I._leave_backward),  # the output is the input
    (_P.FORWARD, Hook.POST_BACKWARD): (_I._begin_backward, _I._leave_backward),
    (_P.BACKWARD, Hook.POST_BACKWARD): (_I._leave_backward,),
    (_P.BACKWARD, Hook.END_BACKWARD): (_I._end_backward,),
    (_P.IDLE, Hook.END_BACKWARD): (_I._end_backward,),  # pipelining ends the last of several backwards by hand
}
"""The actions of each hook in each pass. Their argument is a state, or a call for the hooks that a call has itself."""

_iterations: tuple[ref[Iteration], ...] = ()
"""All iterations, oldest first: in the same order on every rank. Replaced, never changed."""
_iterations_lock = threading.Lock()


def _register(iteration: Iteration) -> None:
    global _iterations
    with _iterations_lock:
        _iterations = (*(known for known in _iterations if known() is not None), ref(iteration))


def known_iterations() -> list[Iteration]:
    """Return the iterations of all roots, in the same order on every rank."""
    return [iteration for known in _iterations if (iteration := known()) is not None]


def _wait_for(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def _noop() -> None:
    pass


def _weak_callback(iteration: Iteration, hook: Hook, state: FSDPState) -> Callable[[], None]:
    """Return a callable that runs ``hook`` for ``state``. It owns neither, because both own objects that hold it."""
    weak_iteration, weak_state = ref(iteration), ref(state)

    def call() -> None:
        alive, its_state = weak_iteration(), weak_state()
        if alive is not None and its_state is not None:
            alive._run(hook, its_state)

    return call
