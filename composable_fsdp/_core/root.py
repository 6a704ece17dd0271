"""The step of one root module, from top to bottom.

The hooks of modules and of autograd call ``pre_forward``, ``post_forward``, ``pre_backward``, ``gradient_ready``,
``post_backward`` and ``end_backward``. These decide, and act through the verbs of a launcher. A pass is IDLE; FORWARD,
from the outermost module's pre-forward to its post-forward; or BACKWARD, from the first gradient that reaches an FSDP
state to the end of the autograd run. Recomputation under activation checkpointing is a forward inside BACKWARD.

Invariants: nothing is in flight outside of passes, except reductions if the last backward does not wait, and gathers of
``unshard(async_op=True)``. After backward, every gradient from autograd is reduced, or held if gradient synchronization
is off. Every parameter group is sharded unless it was asked to stay unsharded.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeVar
from weakref import ref

import torch
from torch.autograd import Variable

from composable_fsdp import trace
from composable_fsdp._core.backward import (
    Finalization,
    GroupReduction,
    Launcher,
    Progress,
    ReductionQueue,
    reduce_together,
    unwatched_output,
)
from composable_fsdp._core.gather import AllGather
from composable_fsdp._core.group import UNSHARD_STARTED, AutogradTask, ParamGroup
from composable_fsdp._core.group_plan import HELD_GRADIENTS, LOCAL_GRADIENTS, GradientState, Hook, ParameterState, Pass
from composable_fsdp._core.memory import CommStreams
from composable_fsdp._core.schedule import ALONE, PlannedRun, Planner
from composable_fsdp._core.seams import (
    Observer,
    Observers,
    dispatch_modes,
    function_modes,
    in_autocast,
    in_transform,
    outside_callers_context,
    runs_outside,
    runs_unseen,
)
from composable_fsdp._core.state import NO_RECORD, Accumulation, ForwardCall, ForwardRecord, FSDPState, Run, alive
from composable_fsdp.errors import DivergenceError, LifecycleError, PeerError
from composable_fsdp.policies import ReshardKind

# Up to Python 3.11, a member takes as long as a call to look up on its enum.
IDLE, FORWARD, BACKWARD = Pass.IDLE, Pass.FORWARD, Pass.BACKWARD
_SUM_UNSHARDED, _SHARDED = Accumulation.UNSHARDED, ParameterState.SHARDED
_UNSHARDING, _REDUCING = ParameterState.UNSHARDING, GradientState.REDUCING
_ARRIVING, _LOCAL, _PARTIAL = GradientState.ARRIVING, GradientState.LOCAL, GradientState.PARTIAL
_PRE_FORWARD, _POST_FORWARD, _PRE_BACKWARD = Hook.PRE_FORWARD, Hook.POST_FORWARD, Hook.PRE_BACKWARD
_GRAD_READY, _POST_BACKWARD = Hook.GRAD_READY, Hook.POST_BACKWARD
_OF_BACKWARD = frozenset((_PRE_BACKWARD, _GRAD_READY, _POST_BACKWARD))
_NEVER, _AUTO, _SMALLER = ReshardKind.NEVER, ReshardKind.AUTO, ReshardKind.SMALLER


_MOST_FORWARDS = 256
"""The maximum number of forwards kept for a later backward. There are more only if no backward is intended."""


# Note: order of free, wait and reduce
#
# A reduction allocates a message as large as the gradients. So where one hook may do both, it frees the full parameters
# first, and the memory peak has one of the two. In ``unshard``, the wait for this group comes before the gathers ahead
# if nothing had to be gathered now: a gather ahead would otherwise be in flight while the host waits for an older one.
# If this group was late, gathers ahead are launched before the wait, so that they overlap with it. In forward on
# streams they always are: ``PlannedRun.before_wait``.
# At the end of backward: sums that are in flight are drained, held gradients reduced, then the group is freed or kept;
# all in the order of modules, so that all ranks launch alike. The wait for all reductions comes last, once.


S = TypeVar("S")
T = TypeVar("T")


def _hook(kind: Hook) -> Callable[[Callable[[Root, S], T]], Callable[[Root, S], T]]:
    """Run a hook outside of the caller's context, if that is not plain, and tell observers of it and its subject.

    Inside of BACKWARD, the caller's context of the last pre-backward holds. As a function around each hook this takes
    half of the time of a context manager. The ends of passes have the outermost or root state as their subject, which
    observers get.
    """
    # GRAD_READY and POST_BACKWARD come in autograd's threads, by the hundred: they take the context that the last
    # pre-backward found.
    follows_pre_backward, is_of_backward = kind in (_GRAD_READY, _POST_BACKWARD), kind in _OF_BACKWARD

    def decorate(body: Callable[[Root, S], T]) -> Callable[[Root, S], T]:
        @functools.wraps(body)
        def run(self: Root, subject: S) -> T:
            # A pass may begin.
            if self.current_pass is IDLE:
                for observe in self.observers.before_first_hook:
                    observe(self)
            # The context of the caller.
            if follows_pre_backward and self.current_pass is BACKWARD:
                is_in_context = self.progress.is_in_context
            else:
                is_in_context = bool(dispatch_modes() or function_modes() or in_transform() or in_autocast())
                if is_of_backward:
                    self.progress.is_in_context = is_in_context
            if not (is_in_context or self.observers.before_hook or self.observers.after_hook):
                return body(self, subject)
            with outside_callers_context() if is_in_context else nullcontext():
                for observe in self.observers.before_hook:
                    observe(self, kind, subject)
                try:
                    return body(self, subject)
                finally:
                    for observe in self.observers.after_hook:
                        observe(self, kind, subject)

        return run

    return decorate


class Root:
    """The passes of the outermost module of ``root_state``. ``states`` are all FSDP states below it, in module order.

    Attributes:
        finalization: the end of the reductions of a step.
        post_optimizer_event: the event after the optimizer's step, for which the next forward's first gather waits.
        refuse: set while no module may run: raises the error that says why. Else ``None``.
        current_pass: the pass that runs, or ``IDLE``.
        leads_to_backward: returns whether a backward may follow what runs now. An observer may replace it.
        outermost: the state of the outermost module of the current forward, inside of which a backward may run; else
            ``None``.
        progress: the progress of the current or last backward.
        observers: the observers, bound for each event.
    """

    def __init__(
        self,
        root_state: FSDPState,
        states: Mapping[str, FSDPState],
        launcher: Launcher,
        task: AutogradTask,
        observers: Sequence[Observer],
    ) -> None:
        self.root_state, self.states, self.launcher = root_state, states, launcher
        self.finalization = Finalization()
        self.post_optimizer_event: Any = None
        self.refuse: Callable[[], None] | None = None
        self.leads_to_backward: Callable[[], bool] = torch.is_grad_enabled
        self.planner = Planner(root_state, states, has_streams=launcher.has_streams)
        self.progress = Progress(states.values(), task)
        self.queue = ReductionQueue(self.planner, launcher)
        self.current_pass = IDLE
        self._thread: threading.Thread | None = None
        """The thread that began the current pass, or the forward around it."""
        self._end: ref[Callable[[], None]]
        """The callback at the end of the last backward, which autograd holds until its run has ended or failed."""
        self.outermost: FSDPState | None = None
        self._grad_mode = True
        """The grad mode of the outermost module's forward."""
        self.is_verified = False
        """True once the observers have compared the model between ranks."""
        self.observers = Observers(self, observers)

    # -- forward

    @_hook(_PRE_FORWARD)
    def pre_forward(self, call: ForwardCall) -> None:
        """The forward ``call`` of a module begins."""
        state = call.state
        if state is self.outermost or self.current_pass is BACKWARD:
            self._check_alive(state)
        if state.run is not None:  # another module of the group ran before, and shares its run
            call.run = state.run  # also in a recomputation, while another module of the list is still to come
            return
        run, recomputes = Run(), self.current_pass is BACKWARD
        # The outermost module begins the pass.
        if self.current_pass is IDLE:
            self._begin_forward(call)
        for observe in self.observers.begin_run:
            observe(self, state)
        call.run = run
        # Gather what the run needs, and what comes after it.
        if recomputes:  # each recomputation is a run of its own
            self.unshard(state, self.planner.eager(state.group.name, in_backward=True, recomputes=True), "backward")
            return
        run.planned = self.planner.next_run(state)
        if len(state.module_refs) > 1:
            run.remaining = set(map(id, state.modules))
        state.run = run  # before the gather, which may raise: the record has the run
        self.unshard(state, run.planned, "forward")
        for observe in self.observers.enter_forward:
            observe(self, call)

    @_hook(_POST_FORWARD)
    def post_forward(self, call: ForwardCall) -> bool:
        """The forward ``call`` of a module has ended. Return whether a backward may come back to it."""
        run, grad_enabled, is_in_backward = call.run, torch.is_grad_enabled(), self.current_pass is BACKWARD
        if not is_in_backward:
            self._end_run(call, run)
        if grad_enabled:
            call.is_recomputed = is_in_backward
            if run.position < 0:  # not in the record of a forward: backward serves it eagerly
                run.record, run.position = ForwardRecord(), 0
        return grad_enabled

    def _end_run(self, call: ForwardCall, run: Run) -> None:
        state, has_grad = call.state, self.leads_to_backward()
        for observe in self.observers.end_run:
            observe(self, state)
        # The first end of the run gives it a place in the record, to which backward comes back.
        if run.record is NO_RECORD:
            run.record = self.planner.record
            may_come_back = has_grad and bool(state.group.plan.specs)
            run.position = run.record.end(state.group.post_forward_event, leads_to_backward=may_come_back)
            if run.position >= 0:
                self.progress.forwards.setdefault(run.record, set()).add(state)
        # The last module of the group frees it.
        is_outermost = state is self.outermost
        if run.remaining and not is_outermost:
            return
        state.run = None
        self.free_after_forward(state, run.planned, has_grad=has_grad)
        if is_outermost:
            self._end_forward(state)

    def _begin_forward(self, call: ForwardCall) -> None:
        self.current_pass, self.outermost = FORWARD, call.state
        self._begin_pass(FORWARD)
        # Before the first collective: ranks agree, and the optimizer is done.
        self.verify_ranks()
        if self.post_optimizer_event is not None:
            self.streams.gather.wait_event(self.post_optimizer_event)
            self.post_optimizer_event = None
        # What is left of earlier steps.
        self._forget_before_step()
        self.drain_before_changes()
        self._grad_mode, forwards = torch.is_grad_enabled(), self.progress.forwards
        if self._grad_mode and len(forwards) >= _MOST_FORWARDS:
            del forwards[next(iter(forwards))]
        for observe in self.observers.begin_forward:
            observe(self, call.state)
        # Groups that stayed unsharded are used if they are fresh, and asked again in the next forward.
        for other in self.states.values():
            if other.kept is not None:
                self.free_if_stale(other)
        self.planner.begin_forward(call.state, leads_to_backward=self._grad_mode)

    @_hook(Hook.END_FORWARD)
    def _end_forward(self, outermost: FSDPState) -> None:
        for observe in self.observers.end_forward:
            observe(self)
        # End runs of which some modules did not come, and free what was gathered ahead for runs that did not come.
        for other in self.states.values():
            if other.run is not None:
                other.run = None
                self.free_after_forward(other, None, has_grad=self.leads_to_backward())
            if other.group.parameter_state is _UNSHARDING:
                self.launcher.free(other.group)
        self.planner.end_forward(outermost)
        succeeded = False
        try:
            for observe in self.observers.before_end:
                for work in observe(self, FORWARD):
                    work.wait()
            succeeded = True
        finally:
            self.current_pass, self.outermost = IDLE, None
            self._end_pass(FORWARD, succeeded=succeeded)

    @runs_outside
    def abort_forward(self, call: ForwardCall, error: BaseException | None) -> None:
        """Reshard what only ``call`` used, a forward that raised. Return to IDLE if it is the outermost one."""
        state = call.state
        if error is not None:
            for observe in self.observers.raised:
                observe(self, call, error)
        # A recomputation: the backward around it goes on, or fails by itself.
        if self.current_pass is BACKWARD:
            return
        if state.run is not None and state.run.record is NO_RECORD:
            self.planner.record.abort(state.group.pre_forward_event)
        state.run = None
        with suppress(PeerError, DivergenceError):  # the original error is being raised already
            if state is self.outermost:
                self._back_to_idle()
                self.progress.forwards.pop(self.planner.record, None)
            for member in (state, *state.owner_states):
                if not member.is_in_use:
                    self.launcher.free(member.group)

    # -- backward

    @_hook(_PRE_BACKWARD)
    def pre_backward(self, call: ForwardCall) -> None:
        """A gradient reached an output of ``call``."""
        if self.current_pass is not BACKWARD:
            self._begin_backward()
        state, run = call.state, call.run
        for owner in state.owner_states:
            if owner.root is not None and owner.root.current_pass is not BACKWARD:  # it is not this one
                owner.root._begin_backward()  # whose end reduces and frees what no hook completes
        self.progress.enter(call)
        if state is not self.root_state:
            self.progress.current = state
        # With reentrant checkpoints only: in others no gradient enters the recomputed graph.
        if call.is_recomputed and state in self.queue.waiting:
            self.reduce_gradients(state)  # before a backward inside this one adds to them
        for observe in self.observers.enter_backward:
            observe(self, call)
        # Gather again what the forward has freed.
        if state.options.unshard_in_backward:
            self.unshard(state, self.planner.backward_of(run.record, run.position, state.group.name), "backward")

    @_hook(_GRAD_READY)
    def gradient_ready(self, state: FSDPState) -> None:
        """The gradients of ``state`` are complete."""
        if self.current_pass is not BACKWARD:
            self._begin_backward()  # no hook saw an output of the module
        if state not in self.progress.reached and not self.progress.has_entered(state):
            raise unwatched_output(state)
        options = state.options
        if state.open_calls > 0:
            is_freed_first = options.reshard_after_backward and not state.has_nested_states and not state.is_shared
            if self.launcher.has_streams and is_freed_first:
                return  # by the post-backward, which then reduces. Note: order of free, wait and reduce
        elif options.reshard_after_backward and self._is_over_for(state):
            self.launcher.free(state.group)  # first, because the reduction allocates memory
        if options.accumulation is not _SUM_UNSHARDED and not options.reduced_by_observer:
            is_wrapped = state.backward_wrappers.post_backward is not None
            (self.reduce_gradients if is_wrapped else self.queue.send)(state)  # which has nothing else to ask here

    @_hook(_POST_BACKWARD)
    def post_backward(self, call: ForwardCall) -> None:
        """The gradients of the inputs of ``call``, and of its use of the parameters, are complete."""
        if self.current_pass is not BACKWARD:
            self._begin_backward()  # the output is the input
        state, run = call.state, call.run  # Note: run and call
        self.progress.leave(call)
        if run.position in run.record.ends_without_hook:
            return  # the last gradient, or the end of backward, comes later. Note: ends that no hook sees
        is_freed = state.options.reshard_after_backward and not state.user_states
        if run.awaited <= 0 and is_freed and not (self.outermost is not None and state.is_in_use):
            self.launcher.free(state.group)  # Note: order of free, wait and reduce
        if state.open_calls > 0 or state in self.queue.waiting or state.options.reduced_by_observer:
            return
        if state.group.gradient_state is _ARRIVING and self.progress.may_come_later(state):
            return  # other ranks may have no gradient to reduce yet
        self.reduce_gradients(state)

    def end_backward(self) -> None:
        """Autograd has run the backward: reduce what is left, reshard, and wait if this is the step's last one."""
        self._end_backward(self.root_state)

    @_hook(Hook.END_BACKWARD)
    def _end_backward(self, _: FSDPState) -> None:
        for observe in self.observers.end_backward:
            observe(self)
        # Nothing may come after this.
        self.progress.leave_out_unused()
        self.progress.end()
        self.queue.waiting.clear()
        for state in self.states.values():
            self._end_backward_of(state)
        # Wait, once, for everything that is in flight.
        works = [work for observe in self.observers.before_end for work in observe(self, BACKWARD)]
        self.finalization.is_due = self.finalization.is_manual
        if self.waits_after_backward:
            self.finish_reductions()
        for work in works:
            work.wait()
        self._end_pass(BACKWARD, succeeded=True)
        self.current_pass = FORWARD if self.outermost is not None else IDLE

    def _end_backward_of(self, state: FSDPState) -> None:
        """Reduce or hold what is left of ``state``'s gradients, and free or keep its parameters."""
        state.open_calls, group = 0, state.group
        if group.partial_reduction is not None and group.gradient_state is _REDUCING and not state.keeps_partial:
            self.drain()  # this backward did not use the group, which holds the sums only then
        # Gradients that no hook completed.
        if group.gradient_state in HELD_GRADIENTS:
            self.reduce_gradients(state, at_end=True)
        if state.options.accumulation is _SUM_UNSHARDED:
            group.were_summed = True
        if group.parameter_state is _SHARDED:
            return
        if state.options.reshard_after_backward:
            if not self._is_used_around(state):
                self.launcher.free(state.group)
            return
        if not group.unshard_started:
            return  # its slices stay, as the forward has left them
        self.launcher.wait(state.group)  # gathered ahead for a run that did not come
        state.note_kept(self.planner.steps_at_forward)
        for observe in self.observers.kept:
            observe(self, state)

    def _is_used_around(self, state: FSDPState) -> bool:
        """Return whether the forward around this backward, if there is one, goes on to use parameters of ``state``."""
        return self.outermost is not None and state.is_in_use

    def _is_over_for(self, state: FSDPState) -> bool:
        """Return whether the rest of backward needs no parameter of ``state``, all of which have gradients.

        If other states are nested inside, this holds only after backward has been through all other states.
        """
        plan, reached = state.group.plan, self.progress.reached
        is_frozen_in_part = plan.num_trainable < len(plan.specs)
        if is_frozen_in_part or state not in reached or state.user_states or self._is_used_around(state):
            return False
        # A nested state may come later, and use parameters of the group around it.
        others = (other for other in self.states.values() if other is not state and other.group.plan.specs)
        return not state.has_nested_states or all(
            other in reached and other.group.parameter_state is _SHARDED for other in others
        )

    def _begin_backward(self) -> None:
        self.check_available()
        self.progress.begin()
        end = functools.partial(self.end_backward)
        self.current_pass, self._end = BACKWARD, ref(end)
        self.drain_before_changes()
        self._begin_pass(BACKWARD)
        self.launcher.at_end_of_backward(end)
        self.planner.begin_backward()
        self.queue.begin_backward()
        for state in self.states.values():
            if state.group.were_summed:
                state.group.hold_set_gradients()

    def _begin_pass(self, which: Pass) -> None:
        if which is FORWARD or self.outermost is None:  # else a forward around this backward goes on in its thread
            self._thread = threading.current_thread()
        for observe in self.observers.begin_pass:
            observe(self, which)

    def _end_pass(self, which: Pass, *, succeeded: bool) -> None:
        for observe in self.observers.end_pass:
            observe(self, which, succeeded)

    # -- actions of several hooks

    def unshard(self, state: FSDPState, planned: PlannedRun, direction: str) -> None:
        """Make the parameters of ``state`` and of its owners ready, and gather what is ``planned`` ahead."""
        planner, launcher = self.planner, self.launcher
        needed = (state, *state.owner_states) if state.owner_states else (state,)
        # What is needed now. Late: the gathers ahead are launched before the wait.
        is_late = planned.before_wait
        for member in needed:
            if member.group.parameter_state not in UNSHARD_STARTED:
                is_late = True
                if member is state:
                    launcher.gather(*planner.gather_of(planned.own, planned.fused, direction))
                else:  # maybe of another root
                    launcher.gather(*planner.gather_of((member.group.name,), planned.fused, direction, (member.group,)))
        # It was gathered ahead: wait first. Note: order of free, wait and reduce
        if not is_late:
            for member in needed:
                launcher.wait(member.group)
        # What comes next, if there is memory for it.
        for names in planned.ahead:
            if self.states[names[0]].group.parameter_state not in UNSHARD_STARTED and planner.fits(names):
                launcher.gather(*planner.gather_of(names, planned.fused, direction))
        if is_late:
            for member in needed:
                launcher.wait(member.group)

    def free_after_forward(self, state: FSDPState, planned: PlannedRun | None, *, has_grad: bool) -> None:
        """Free, shrink or keep ``state`` and its owners after a forward, as their settings and ``planned`` say."""
        if state.keeps_unsharded:
            state.note_kept(self.planner.steps_at_forward)
            return
        for member in (state, *state.owner_states) if state.owner_states else (state,):
            if member.is_in_use:
                continue
            # As the user set it, then as the plan says.
            kind, steps = member.options.reshard.kind, self.planner.steps_at_forward
            if member is not state and member.root is not self:  # which counts the steps of its own parameters
                steps = member.root.planner.steps.number
            stays = kind is _NEVER or (kind is _AUTO and member is self.root_state and has_grad)
            kept = planned.keep if planned is not None and has_grad and self._grad_mode else ALONE
            if stays or (kept and member.group.name in kept and self.planner.fits(kept[member.group.name])):
                member.note_kept(steps)
            elif kind is _SMALLER and has_grad:
                member.note_kept(steps)
                self.launcher.shrink(member.group, member.options.reshard.mesh_size)
            else:
                self.launcher.free(member.group)
        if state.keeps_unsharded is False:
            self.launcher.free(state.group)

    def free_if_stale(self, state: FSDPState) -> None:
        """Free the parameters of ``state`` if they are kept, and their shards may have changed since."""
        if self.planner.is_stale(state):
            self.launcher.free(state.group)
            state.kept = None

    def reduce_gradients(self, state: FSDPState, *, at_end: bool = False) -> None:
        """Reduce the gradients that autograd left on ``state``, or hold them if gradient synchronization is off.

        That is when the last gradient is ready; on streams, in the post-backward, where the parameters are freed first;
        for a fusion, with the last of its members; for the rest, ``at_end`` of backward, which also reduces what
        earlier backwards left partly reduced. Each caller is too early for some, and does nothing for these.
        """
        held = state.group.gradient_state
        if held not in LOCAL_GRADIENTS and not (at_end and held is _PARTIAL and not state.keeps_partial):
            return
        if held is _ARRIVING and not self.progress.has_entered(state):
            raise unwatched_output(state)
        if state.backward_wrappers.post_backward is None:
            self.queue.send(state, at_end=at_end)
        else:
            state.backward_wrappers.post_backward(functools.partial(self.queue.send, state, at_end=at_end))

    # -- between passes

    def act_by(self, launcher: Launcher) -> None:
        """Let ``launcher`` do what this root decides from now on."""
        self.launcher = self.queue.launcher = launcher

    @property
    def streams(self) -> CommStreams:
        """The streams for all launches. They may be replaced between passes, because roots can share streams."""
        return self.launcher.streams

    @streams.setter
    def streams(self, streams: CommStreams) -> None:
        self.drain()
        self.launcher.streams = streams

    @property
    def waits_after_backward(self) -> bool:
        """True if the next backward waits at its end for all reductions."""
        return self.finalization.is_last_backward and not self.finalization.is_manual

    def unshard_explicitly(self, state: FSDPState) -> None:
        """Launch the all-gather of ``state``, which stays unsharded."""
        for observe in self.observers.before_first_hook:
            observe(self)
        self.verify_ranks()
        if not state.is_running and self.planner.is_stale(state):
            state.reshard()
            state.kept = None
        is_new = not state.group.can_skip_unshard
        self.launcher.gather((state.group,), f"all-gather of {state.group.name}")
        if is_new:
            state.note_kept(self.planner.steps.number)
            for observe in self.observers.unsharded:
                observe(self, state)
        elif state.kept is None:
            state.note_kept(self.planner.steps_at_forward)

    def drain(self) -> None:
        self.queue.drain()

    def drain_before_zero(self) -> None:
        """Wait for all reductions, whose results nobody needs. The next pass reports a failure of another rank."""
        with suppress(PeerError, DivergenceError):
            self.drain()

    def drain_before_changes(self) -> None:
        """Wait for reductions in flight if ``requires_grad`` of a parameter changed since their launch.

        Their outputs have the layout of the plan at the time of the launch.
        """
        if self.queue.are_in_flight and any(state.group.was_flipped for state in self.states.values()):
            self.drain()

    def finish_reductions(self) -> None:
        """Wait for all reductions in flight, set their gradients, and tell clients so."""
        self.drain()
        for state in self.states.values():
            if state.backward_wrappers.post_backward is not None:
                state.backward_wrappers.post_backward(lambda: None)  # only now the reduced gradients are set

    def reduce_held(self, occasion: str, states: Iterable[FSDPState], *, frees: bool = False) -> None:
        """Launch the reductions of all gradients that ``states`` hold after earlier backwards.

        Args:
            occasion: the call that asks for it, for the error.
            states: the states to reduce.
            frees: first free the parameters of the root that the end of a backward would free now.

        Raises:
            LifecycleError: a forward or backward runs.
        """
        if self.current_pass is not IDLE:
            place = f"the {self.current_pass.value} of {self.root_state.name}"
            raise LifecycleError(
                f"{occasion} was called in {place}, which may still give gradients: call it afterwards."
            )
        self.check_available()
        states = tuple(states)
        for state in states:
            self.notice_gradients(state)
        for state in self.states.values() if frees else ():  # first, because the reductions allocate memory
            if state.options.reshard_after_backward:
                self.launcher.free(state.group)
        self.queue.send_held(states)

    def notice_gradients(self, state: FSDPState) -> None:
        """Include gradients of ``state`` that were set without autograd's accumulation in the next reduction.

        Zero-bubble schedules of pipelines set those of weights so, if they find the weights.
        """
        group = state.group
        group.notice_gradients()
        has_lost = group.gradient_state not in HELD_GRADIENTS and group.plan.num_trainable
        if has_lost and group.were_summed and state in self.progress.reached:
            warnings.warn(
                f"backward went through {state.name!r}, but left no gradient on any of its parameters. Pipeline "
                "schedules that compute the gradients of weights apart from those of inputs, such as zero bubble, look "
                "for the parameters before backward brings them into memory: shard their stages with "
                "reshard_after_forward=False.",
                stacklevel=2,
            )

    def reset(self) -> None:
        """Return to IDLE from any state.

        Complete reductions, reshard everything, and drop all gradients: those of a failed backward have been reduced
        for some groups only, and reductions in flight would set them after a ``zero_grad`` of the optimizer. After a
        pass that failed on any rank, all ranks must call it.
        """
        # Ranks meet, if they can.
        have_met = False
        for observe in self.observers.reset:
            have_met |= observe(self)
        # Nothing in flight, no gradients, no parameters unsharded.
        self.drain()
        self.finalization.is_due, self.finalization.in_flight = False, None
        for state in self.states.values():
            state.group.drop_gradients()
            for parameter in state.group.parameters:
                parameter.sharded.grad = None
            self.launcher.free(state.group)
        self._back_to_idle()
        if have_met:  # they may have gathered different groups
            for observe in self.observers.have_met:
                observe(self)
            self.planner.forget()
        self.progress.forwards.clear()
        for observe in self.observers.after_reset:
            observe(self)

    def abandon(self) -> None:
        for stream in (self.streams.gather, self.streams.reduce, self.streams.replicate):
            stream.join()  # copies on it may still use buffers, which are freed without a wait
        self.queue.abandon()
        for state in self.states.values():
            state.group.abandon()

    def _back_to_idle(self) -> None:
        for state in self.states.values():
            state.open_calls, state.kept, state.run = 0, None, None
            # A module of another root goes on, if it has caught the error.
            if not any(user.root is not self and user.is_running for user in alive(state.user_states)):
                self.launcher.free(state.group)
        self.progress.forget()
        self.queue.waiting.clear()
        if self.outermost is not None:
            self._end_pass(FORWARD, succeeded=False)
        if self.current_pass is BACKWARD:
            self._end_pass(BACKWARD, succeeded=False)
        self.current_pass, self.outermost = IDLE, None

    def may_come_back_to(self, state: FSDPState) -> bool:
        """Return whether a backward may follow a forward that has used parameters of ``state``."""
        self._forget_before_step()
        users = {state, *alive(state.user_states)}
        return not all(ran.isdisjoint(users) for ran in self.progress.forwards.values())

    def _forget_before_step(self) -> None:
        """Forget the forwards from before the last optimizer step: they get no backward."""
        if self.planner.steps.number != self.planner.steps_at_forward:
            self.progress.forwards.clear()

    def has_shards_in(self, storages: Container[int]) -> bool:
        """Return whether any shard is in one of ``storages``, the C addresses of ``torch.UntypedStorage``."""
        buckets = (bucket for state in self.states.values() for bucket in state.group.buckets)
        return any(tensor.untyped_storage()._cdata in storages for bucket in buckets for tensor in bucket.versioned)

    # -- checks

    def check_thread(self, state: FSDPState) -> None:
        """Raise a ``LifecycleError`` if another thread is inside a pass, or no module may run."""
        if self.refuse is not None:
            self.refuse()
        thread = self._thread
        if self.current_pass is IDLE or thread is None or thread is threading.current_thread():
            return
        # A recomputation is in a thread of autograd, which has one for each device. A backward that failed has ended.
        if self.current_pass is FORWARD or (self._end() is not None and self.progress.task.is_outside):
            raise LifecycleError(
                f"thread {threading.current_thread().name!r} began a forward of {state.name!r} while thread "
                f"{thread.name!r} is inside the {self.current_pass.value} of {self.root_state.name!r}. A sharded model "
                "is not re-entrant: let one thread run it at a time, or give each a copy of its own. If that pass was "
                "left by an exception, call reset_iter_state() on the root module."
            )

    def check_available(self) -> None:
        """Raise a ``LifecycleError`` if no module may run now."""
        if self.refuse is not None:
            self.refuse()

    def _check_alive(self, state: FSDPState) -> None:
        """Raise an error if an earlier pass ended in an exception without recovery."""
        # In FORWARD, the outermost module begins again: its last forward did not end. In BACKWARD, a forward
        # begins that is no recomputation.
        has_failed = state is self.outermost if self.current_pass is FORWARD else self.progress.task.is_outside
        if has_failed:
            raise LifecycleError(
                f"the forward of {state.name!r} begins while the last {self.current_pass.value} pass under "
                f"{self.root_state.name!r} has not ended; it was probably left by an exception. Call "
                "reset_iter_state() on the root module before the next step."
            )

    def verify_ranks(self) -> None:
        """Check the settings, and let observers compare the model across ranks, once, before the first collective."""
        if not self.is_verified:
            self._verify_ranks()

    @runs_unseen
    def _verify_ranks(self) -> None:
        for state in self.states.values():
            state.group.check_grad_dtypes()
        for observe in self.observers.before_first_collective:
            observe(self)
        self.is_verified = True


class StreamLauncher:
    """Launches on ``streams``, those of a device."""

    def __init__(self, streams: CommStreams) -> None:
        self.streams = streams
        self.has_streams = streams.device.has_streams

    def gather(self, groups: Sequence[ParamGroup], label: str) -> None:
        """Launch one all-gather for those of ``groups`` that need it, called ``label`` in errors.

        If this raises, their unsharded memory is freed, unless part of the all-gather is in flight.
        """
        # Apply changes of parameters, and choose the groups.
        needed = []
        for group in groups:
            if group.gradient_state in HELD_GRADIENTS and group.was_flipped:
                held = reduce_together((group,), self.streams)  # first, as the next plan has another layout
                if held is not None:
                    held.run()
                    held.complete()
            if group.needs_gather():
                needed.append(group)
        # Launch, by the last all-gather if that was of the same buckets.
        buckets = [bucket for group in needed for bucket in group.slices or group.buckets]
        pending, begin = None, None
        if buckets:  # not, for example, a root whose parameters all belong to nested modules
            begin = trace.now() if trace.listeners else None
            first = needed[0]
            gather = first.last_gather
            if gather is None or not gather.is_of(buckets):
                gather = AllGather(buckets, first.axes.device)
                if not first.slices:  # slices are new objects in each pass
                    first.last_gather = gather
            gather.begin(label)
            try:
                # Finished by the wait, so that parameters are copied, and take memory, only when a module needs them.
                pending = self.streams.gather.run(
                    gather.launch, gather.finish, allocate=gather.allocate, prepare=gather.prepare, finish_in_wait=True
                )
            except BaseException:
                if not gather.writes_to_places:
                    for bucket in (bucket for group in needed for bucket in group.buckets):
                        bucket.free()
                raise
        for group in needed:
            group.begin_gather(pending, self.streams.gather.name, begin)

    wait = staticmethod(ParamGroup.wait)
    free = staticmethod(ParamGroup.reshard)
    shrink = staticmethod(ParamGroup.shrink)
    reduce = staticmethod(GroupReduction.run)
    start = staticmethod(GroupReduction.start)
    finish = staticmethod(GroupReduction.complete)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        engine: Any = Variable._execution_engine
        engine.queue_callback(callback)
