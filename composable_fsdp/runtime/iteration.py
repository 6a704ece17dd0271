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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable

from composable_fsdp.comm.agreement import OrderCheck
from composable_fsdp.comm.passes import is_in_backward
from composable_fsdp.comm.protocol import AliasingCommunicator
from composable_fsdp.errors import DivergenceError, PeerError
from composable_fsdp.labels import ask_logger, labelled
from composable_fsdp.lifecycle import GradientState, Key, ParameterState
from composable_fsdp.memory.lanes import Lanes, Work
from composable_fsdp.runtime.backward import Backward
from composable_fsdp.runtime.call import Call
from composable_fsdp.runtime.company import Company
from composable_fsdp.runtime.instep import InStep
from composable_fsdp.runtime.manifest import check_models
from composable_fsdp.runtime.order import ForwardOrder
from composable_fsdp.runtime.recovery import Meeting, disconnect, has_failed, meet, reconnect
from composable_fsdp.runtime.reductions import Reductions
from composable_fsdp.runtime.refusals import another_thread, left_by_an_exception, unseen_output
from composable_fsdp.runtime.schedule import ForwardRecord
from composable_fsdp.runtime.settings import check_settings
from composable_fsdp.runtime.steps import sharded_steps
from composable_fsdp.runtime.underway import UnderWay
from composable_fsdp.runtime.unit import Accumulation, Round, Unit
from composable_fsdp.runtime.unsharding import Unsharding

__all__ = ["Iteration"]


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
    """The passes of one root. ``units`` are all below it, in module order."""

    def __init__(self, root: Unit, units: Mapping[str, Unit], lanes: Lanes) -> None:
        self.root = root
        self.units = units
        self._lanes = lanes
        self.is_last_backward = True
        self.post_optimizer_event: Any = None
        """Recorded by the user after the optimizer's step: the first all-gather of the next forward waits for it."""
        self._pass = Pass.IDLE
        self._around_backward = Pass.IDLE
        self._outermost: Unit | None = None
        self._record = ForwardRecord()
        self._backward = Backward(units.values())
        self._steps_when_met = sharded_steps()
        """As of when ranks last met after a pass that failed."""
        self._under_way = UnderWay(root)
        self._order = ForwardOrder()
        self._thread: threading.Thread | None = None
        """Which began the pass that is under way."""
        self._are_alike = False
        """Whether all ranks have built the same, as far as it was asked."""
        axes = (channel.axes.shard for unit in units.values() for channel in unit.group.channels)
        self._sharing = [cast(AliasingCommunicator, c) for c in dict.fromkeys(axes) if c.aliases and c.size > 1]
        """Over which ranks may have shards or full parameters in common memory."""
        self._company = Company(root, units)
        self._unsharding = Unsharding(root, units, lanes, self._company)
        self._reductions = Reductions(units.values(), lanes, self._company, self._unsharding)
        self._grad_mode = True
        """Of the outermost module's forward."""
        self._in_step: InStep | None = None
        """Set while the order of groups must not depend on what this rank runs."""
        for unit in units.values():
            unit.group.gradients.on_batch = _bound(self._batch_of_gradients, unit)
            unit.group.gradients.on_last = _bound(self._last_gradient, unit)

    @property
    def lanes(self) -> Lanes:
        """Where all of it is launched. Others may be set between passes, as roots that share streams have it."""
        return self._lanes

    @lanes.setter
    def lanes(self, lanes: Lanes) -> None:
        self.drain()
        self._lanes = self._unsharding.lanes = self._reductions.lanes = lanes

    # -- what hooks call

    def check_thread(self, unit: Unit) -> None:
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
        if self._pass is Pass.FORWARD or (is_in_backward(thread.ident) and not recomputes):
            raise another_thread(unit, thread, self._pass.value, self.root)

    @labelled("pre_forward", lambda _, unit: unit.name)
    def pre_forward(self, unit: Unit) -> None:
        """A module of ``unit`` is about to compute."""
        self._check_alive(unit)
        if unit.round is not None:
            return  # another module of its list ran before
        self._run(Hook.PRE_FORWARD, unit)
        if self._pass is Pass.FORWARD:
            unit.round = Round(unit.modules)
            if unit.change_check is not None:
                unit.round.seen = unit.change_check.in_forward()

    @labelled("post_forward", lambda _, unit, module: unit.name)
    def post_forward(self, unit: Unit, module: nn.Module) -> Call | None:
        """``module`` of ``unit`` has computed. The call to hand to the autograd hooks, where a backward may come."""
        if self._in_step is not None and self._pass is Pass.FORWARD:
            self._in_step.end(unit)
        of_round = unit.round or Round(())  # recomputations are no rounds: each is its own
        call = None
        if self._leads_to_backward and of_round.position < 0:
            recorded = self._pass is Pass.FORWARD and unit.group.parameters
            of_round.record = self._record if recorded else ForwardRecord()
            of_round.position = of_round.record.append(unit.group.name)
            if recorded:
                self._backward.count(unit, self._record)
        if torch.is_grad_enabled():
            call = Call(unit, of_round, is_recomputed=self._pass is Pass.BACKWARD)
        of_round.remaining.discard(id(module))
        if not of_round.remaining or unit is self._outermost:
            unit.round = None
            self._run(Hook.POST_FORWARD, unit)
        return call

    def abort_forward(self, unit: Unit, error: BaseException | None) -> None:
        """``unit``'s forward raised: it is sharded again, and once the outermost one's has, everything is."""
        if error is not None:
            in_backward, ends_forward = self._pass is Pass.BACKWARD, unit is self._outermost
            self._under_way.note(error, unit, in_backward=in_backward, ends_forward=ends_forward)
        if self._pass is Pass.BACKWARD:
            return
        unit.round = None
        with suppress(PeerError, DivergenceError):  # what went wrong first is being raised already
            if unit is self._outermost:
                self._back_to_idle()
                self._backward.forget_forward(self._record)
            else:
                unit.group.reshard()

    def pre_backward(self, call: Call) -> None:
        """A gradient reached an output of ``call``."""
        if self._pass is not Pass.BACKWARD:
            self._begin_backward()
        if call.entered != self._backward.number:
            self._enter_backward(call)

    @labelled("pre_backward", lambda _, call: call.unit.name)
    def _enter_backward(self, call: Call) -> None:
        unit = call.unit
        self._under_way.reach(unit)
        self._backward.enter(call)
        if unit.change_check is not None and call.round.seen is not None:
            unit.change_check.in_backward(call.round.seen)
        if self._in_step is not None and unit.group.parameters:
            self._in_step.reach(call.round.record, call.round.position, self._backward.number, unit)
        if unit.unshard_in_backward:
            batches = not call.round.ends_unseen and self._sends_batches(unit)
            self._unsharding.in_backward(unit, call.round.record, call.round.position, sends_batches=batches)

    def post_backward(self, call: Call) -> None:
        """The gradients of ``call``'s inputs are complete, and so all that this call adds to its unit's parameters."""
        if self._pass is not Pass.BACKWARD:
            self._begin_backward()
        unit = call.unit
        self._backward.leave(call)
        if call.round.ends_unseen:
            return  # the last gradient or the end of backward comes later than this
        if unit.open_calls <= 0 and self._in_step is None and not self._company.has_settled(unit):
            self.settle_gradients(unit)
        if call.round.awaited <= 0:
            for done in (unit, *unit.lenders):
                if done.reshard_after_backward and not done.borrowers:
                    done.group.reshard()

    def _batch_of_gradients(self, unit: Unit) -> None:
        """All gradients of ``unit``'s next batch are there: they need not wait for the rest of the group."""
        if self._pass is Pass.BACKWARD and self._sends_batches(unit) and self._backward.was_seen(unit):
            self._reductions.send_batch(unit)

    def _sends_batches(self, unit: Unit) -> bool:
        """Whether ``unit``'s gradients go in batches now: not in step, nor in a backward within this one, nor where the
        collectives of others may come between two runs of it.
        """
        if not unit.sends_batches or self._in_step is not None or unit.runs > 1:
            return False
        return self._backward.is_outermost

    def _last_gradient(self, unit: Unit) -> None:
        """Every trainable parameter of ``unit`` has its gradient: reduction need not wait for anything else."""
        if self._pass is not Pass.BACKWARD:
            self._begin_backward()
        if not self._backward.was_seen(unit):
            raise unseen_output(unit)
        if unit.open_calls <= 0 and unit.reshard_after_backward and self._backward.is_over_for(unit):
            unit.group.reshard()  # first, as the reduction takes memory
        if unit.accumulation is not Accumulation.UNSHARDED and self._in_step is None:
            self.settle_gradients(unit)

    # -- actions

    def _run(self, hook: Hook, unit: Unit) -> None:
        for action in _ACTIONS[self._pass, hook]:
            action(self, unit)

    def _begin_forward(self, unit: Unit) -> None:
        self._pass, self._outermost, self._thread = Pass.FORWARD, unit, threading.current_thread()
        self._under_way.begin_forward(unit)
        if not self._are_alike:
            check_settings(self.root, self.units.values())
            check_models(self.root, self.units)
            self._are_alike = True
        if self.post_optimizer_event is not None:
            self.lanes.gather.wait_event(self.post_optimizer_event)
            self.post_optimizer_event = None
        self._record = ForwardRecord()
        self._backward.forget_before_step()
        self.deliver_before_changes()
        self._grad_mode = torch.is_grad_enabled()
        self._in_step = InStep(self, unit) if any(u.unequal_use for u in self.units.values()) else None
        self._unsharding.begin_forward(each_alone=self._in_step is not None)

    def _unshard_in_forward(self, unit: Unit) -> None:
        if self._in_step is not None:
            self._in_step.begin(unit)
        self._unsharding.in_forward(unit)

    def end_skipped(self, unit: Unit) -> None:
        """In place of the hook after forward, for a unit that only other ranks may run."""
        if self._leads_to_backward and unit.group.parameters:
            self._record.append(unit.name)
        self._reshard_after_forward(unit)

    def gather_in_forward(self, unit: Unit) -> None:
        """Brings ``unit`` into memory, as the hook before forward does."""
        self._unsharding.in_forward(unit)

    @property
    def _leads_to_backward(self) -> bool:
        """Whether a backward may come to what runs now. In step, all ranks must find the same."""
        in_step = self._in_step is not None and self._pass is Pass.FORWARD
        return self._grad_mode if in_step else torch.is_grad_enabled()

    def _unshard_for_recomputation(self, unit: Unit) -> None:
        if self._in_step is not None:
            self._in_step.check_recomputed(unit)
        self._unsharding.for_recomputation(unit)

    def gather_in_backward(self, unit: Unit, record: ForwardRecord, position: int) -> None:
        """Brings ``unit``, which ended its forward at ``position``, into memory in step with other ranks."""
        self._unsharding.in_backward(unit, record, position, sends_batches=False)

    def _reshard_after_forward(self, unit: Unit) -> None:
        self._unsharding.after_forward(unit, leads_to_backward=self._leads_to_backward)

    def _end_forward_if_outermost(self, unit: Unit) -> None:
        if unit is not self._outermost:
            return
        if self._in_step is not None:
            self._in_step.end_forward()
        self._pass, self._outermost = Pass.IDLE, None
        self._under_way.end()
        if unit is self.root and self.root.order_check is not OrderCheck.OFF:
            self._order.compare(self._record.ended)
        for other in self.units.values():
            if other.round is not None:  # some modules of its list did not run
                other.round = None
                self._reshard_after_forward(other)
        self._unsharding.end_forward()
        _wait_for(self._leave_shards("end of forward"))

    def _begin_backward(self) -> None:
        ask_logger()
        self._around_backward, self._pass = self._pass, Pass.BACKWARD
        self._thread = threading.current_thread()
        self._backward.begin()
        self.deliver_before_changes()
        self._under_way.begin_backward()
        self._reductions.begin_backward()
        Variable._execution_engine.queue_callback(self.end_backward)

    @labelled("root_post_backward_callback", lambda self: self.root.name)
    def end_backward(self) -> None:
        """What is left to do in a backward, or in several of which each left its gradients for the last one."""
        if self._in_step is not None:
            self._in_step.end_backward(self._backward.number)
        self._backward.end()
        self._unsharding.end_backward()
        self._company.forget_settled()
        for unit in self.units.values():
            unit.open_calls = 0
            if unit.group.gradients.are_held:
                self.settle_gradients(unit, at_end=True)
            if unit.accumulation is Accumulation.UNSHARDED:
                unit.group.gradients.note_sums()
            if unit.group.parameter_state is ParameterState.SHARDED:
                continue
            if unit.reshard_after_backward:
                unit.group.reshard()
            else:
                unit.note_kept()
        leaving = self._leave_shards("end of backward")  # before waiting for gradients, so as to wait only once
        if self.is_last_backward:
            self.drain()
            for unit in self.units.values():
                if unit.client_post_backward is not None:
                    unit.client_post_backward(_nothing)  # only now it finds the reduced gradients
        _wait_for(leaving)
        self._under_way.end_backward()
        self._pass, self._around_backward = self._around_backward, Pass.IDLE

    def _leave_shards(self, occasion: str) -> list[Work]:
        """This rank reads nothing that others wrote to common memory until the next gather. Once the works are done
        none does, so that each may write there.
        """
        return [communicator.part(occasion) for communicator in self._sharing]

    def settle_gradients(self, unit: Unit, *, at_end: bool = False, contributes: bool = False) -> None:
        """Sends the gradients that autograd left on ``unit``, or holds them where it does not synchronise.

        At the end of backward, also what earlier backwards left partly reduced. With ``contributes``, zeros where there
        are none.
        """
        gradients = unit.group.gradients
        if contributes and unit.accumulation is not Accumulation.UNSHARDED:
            gradients.contribute()
        is_local = gradients.state is GradientState.LOCAL
        if not is_local and not (at_end and gradients.state is GradientState.PARTIAL and not unit.keeps_partial):
            return
        if gradients.is_new and not self._backward.was_seen(unit):  # those held since an earlier backward are right
            raise unseen_output(unit)
        alone = self._in_step is not None
        if unit.client_post_backward is None:
            self._reductions.send(unit, at_end=at_end, alone=alone)
        else:
            unit.client_post_backward(functools.partial(self._reductions.send, unit, at_end=at_end, alone=alone))

    # -- endings

    def drain(self) -> None:
        """Completes everything in flight: afterwards all reduced gradients are set."""
        self._reductions.drain()

    def deliver_before_changes(self) -> None:
        """Completes what is in flight where parameters were frozen or thawed since it was launched: what comes lies as
        the plan has it that counted then.
        """
        if self._reductions.are_in_flight and any(
            p.was_flipped for u in self.units.values() for p in u.group.parameters
        ):
            self.drain()

    def reset(self) -> None:
        """Back to IDLE from anywhere: completes reductions, shards everything, drops gradients not yet reduced.

        After a pass that failed, on this rank or another, all ranks must come here. Where they were not at the same
        place, what is in flight is not waited for, and they connect to each other anew.

        Raises:
            PeerError: some ranks did not come, or cannot be reached any more.
            DivergenceError: some took an optimizer step in between and others did not. It comes last: once they all
                have the same parameters, they can go on.
        """
        units = self.units.values()
        meeting = Meeting()
        if has_failed(units):
            meeting = meet(units, sharded_steps() - self._steps_when_met)
            self._steps_when_met = sharded_steps()
        if not meeting.is_together:
            disconnect(units)
            self._reductions.abandon()
            for unit in units:
                unit.group.abandon()
            reconnect(units)
        self.drain()
        for unit in units:
            unit.group.gradients.drop()
        self._back_to_idle()
        self._backward.forget_forwards()
        meeting.check_steps()

    def _back_to_idle(self) -> None:
        for unit in self.units.values():
            unit.group.reshard()
            unit.open_calls, unit.kept_version, unit.round = 0, None, None
        self._backward.forget()
        self._unsharding.end_backward()
        self._company.forget_settled()
        if self._in_step is not None:
            self._in_step.forget_backward()
        self._under_way.end()
        self._pass, self._around_backward, self._outermost = Pass.IDLE, Pass.IDLE, None

    def may_come_back_to(self, unit: Unit) -> bool:
        """Whether a backward may come to a forward that has used parameters of ``unit``."""
        self._backward.forget_before_step()
        return any(each.runs for each in (unit, *unit.borrowers))

    def was_reached(self, unit: Unit) -> bool:
        """Whether the last backward came to ``unit`` through an output that its hooks saw."""
        return self._backward.was_reached(unit)

    def _check_alive(self, unit: Unit) -> None:
        """Tells when an earlier pass ended in an exception that nobody recovered from."""
        died = (self._pass is Pass.BACKWARD and torch._C._current_graph_task_id() == -1) or (
            self._pass is Pass.FORWARD and unit is self._outermost
        )
        if died:
            raise left_by_an_exception(unit, self._pass.value, self.root)


_ACTIONS: Mapping[tuple[Pass, Hook], tuple[Callable[[Iteration, Unit], None], ...]] = {
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


def _bound(method: Callable[[Unit], None], unit: Unit) -> Callable[[], None]:
    return lambda: method(unit)
