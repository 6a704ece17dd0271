"""``FSDPModule``: the methods of sharded modules; ``no_sync`` and ``share_comm_ctx``."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import ref

import torch
from torch import nn

from composable_fsdp._api.conversions import gradients_keep_their_dtype, takes_conversion
from composable_fsdp._api.group_setters import (
    check_between_steps,
    check_count,
    check_factor,
    on_stream,
    set_root_options,
)
from composable_fsdp._api.torch_types import (
    TorchFSDPModule,
    TorchGradientReductionHandle,
    TorchUnshardHandle,
    find_state,
)
from composable_fsdp._core.group_plan import GradientState, ParameterState
from composable_fsdp._core.hooks import root_of
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import runs_outside
from composable_fsdp._core.state import Accumulation, FSDPState, connections, state_of, states_below
from composable_fsdp._other_names import OF_FSDP1, RENAMED, UNSUPPORTED
from composable_fsdp.errors import (
    ArgumentTypeError,
    ConfigurationError,
    ConflictError,
    LifecycleError,
    MissingNameError,
    UnsupportedError,
)
from composable_fsdp.policies import Reshard

if TYPE_CHECKING:
    from composable_fsdp.plan.dry_run import Schedule

__all__ = [
    *("FSDPModule", "GradientReductionHandle", "UnshardHandle"),
    *("find_attribute", "no_sync", "of_torch_alone", "share_comm_ctx", "step_schedule"),
]

logger = logging.getLogger(__name__)


class UnshardHandle(TorchUnshardHandle):
    """Handle of an all-gather in flight, returned by ``FSDPModule.unshard(async_op=True)``."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    @runs_outside
    def wait(self) -> None:
        """Wait for the all-gather and make the unsharded parameters usable.

        Has no effect after the first call, or if the parameters were freed meanwhile, as a forward does.
        """
        state, self._state = self._state, None
        if state is not None and state.group.unshard_started:
            state.group.wait()


class GradientReductionHandle(TorchGradientReductionHandle):  # type: ignore[misc]
    """Handle of gradient reductions in flight, returned by ``FSDPModule.finalize_backward(async_op=True)``."""

    def __init__(self, root: Root | None) -> None:
        self._root = root
        self._token = object()
        if root is not None:
            root.finalization.is_due, root.finalization.in_flight = False, self._token

    @runs_outside
    def wait(self) -> None:
        """Wait for the reductions and set the sharded gradients. Further calls have no effect.

        Raises:
            LifecycleError: ``reset_iter_state`` has dropped the reductions.
        """
        if self._root is not None:
            root, now = self._root, self._root.finalization
            if now.in_flight is not self._token:
                text = "wait() was called after reset_iter_state() has dropped the reductions of the handle."
                raise LifecycleError(text)
            now.in_flight, self._root = None, None
            root.finish_reductions()


class FSDPModule(TorchFSDPModule):
    """Mixin for the class of every module that ``fully_shard`` was applied to.

    Method names and meanings are those of ``torch.distributed.fsdp.FSDPModule``. A setter takes effect at the next
    forward or backward. With ``recurse=True`` it also applies to all sharded modules below this one.
    """

    _orig_cls_mro_index = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the *original* class, so that indexing or slicing a sharded container returns an unsharded one."""
        return cls.__mro__[cls._orig_cls_mro_index](*args, **kwargs)

    # -- unshard and reshard

    @runs_outside
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the parameters of this module's own group, without the groups of modules below it.

        Args:
            async_op: return a handle at once. The next forward of the module waits for the all-gather if nothing else
                has. On an accelerator, wait before the optimizer's step, which writes to what the all-gather reads.
                Ranks of one host that share memory wait for each other in this call nevertheless, and copy.

        Returns:
            An :class:`UnshardHandle` if ``async_op``, otherwise ``None``.
        """
        state = _state(self)
        state.drain_before_changes()
        with _custom_comm().unshard_async_op(state, async_op) if _has_custom_collectives(state) else nullcontext():
            root_of(state).unshard_explicitly(state)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    @runs_outside
    def reshard(self) -> None:
        """Free this module's unsharded parameters. Has no effect if they are sharded already."""
        _state(self).reshard()

    @runs_outside
    def reset_iter_state(self) -> None:
        """Return all ranks to a state in which a new step can begin, after an exception anywhere in the step.

        Completes or drops collectives in flight, reshards every group of the root, drops all gradients of its sharded
        parameters, accumulated ones too, and restores residuals of ``ErrorFeedback``. Repeat the step from its first
        microbatch. All ranks must call this method; they wait for each other. A rank that waits in forward or backward
        for one that has called it raises a ``PeerError``.

        Raises:
            PeerError: some ranks did not call it within the timeout of the process group. The text names them.
            DivergenceError: some ranks took an optimizer step that failed on others, or after a backward that did. Load
                a checkpoint on all ranks; nothing else is needed to continue.
        """
        root_of(_state(self)).reset()

    # -- resharding and prefetching

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed after forward and all-gathered again in backward.

        Raises:
            ArgumentTypeError: not a ``bool``. To reshard to a smaller mesh, use
                ``fully_shard(reshard_after_forward=n)``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentTypeError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}; to reshard to a smaller mesh, "
                "pass an int as fully_shard(reshard_after_forward=...)."
            )
        for state in _states(self, recurse):
            state.change(reshard=Reshard.parse(reshard_after_forward, state.group.axes.shard.size))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after backward.

        Parameters that stay unsharded are all-gathered again after an optimizer step, those of a frozen group only
        after an in-place change of its shards.
        """
        _change(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Set the modules to all-gather when this module begins its forward, instead of the default order.

        Modules that are not below the same root are ignored.
        """
        ahead = _sharded_states("set_modules_to_forward_prefetch", modules)
        _change(self, recurse=False, forward_prefetch=tuple(map(ref, ahead)))

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Set the modules to all-gather when this module begins its backward; else as the method for forward."""
        ahead = _sharded_states("set_modules_to_backward_prefetch", modules)
        _change(self, recurse=False, backward_prefetch=tuple(map(ref, ahead)))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs the parameters. ``False``, as for an embedding, saves the second all-gather."""
        _change(self, recurse=False, unshard_in_backward=unshard_in_backward)

    # -- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. If not, each rank sums full gradients in the reduce dtype.

        :func:`no_sync` with ``sharded=True`` accumulates in the memory of this rank's shards instead.
        """
        accumulation = Accumulation.REDUCE if requires_gradient_sync else Accumulation.UNSHARDED
        _change(self, recurse, accumulation=accumulation, all_reduce=requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits at its end for reductions in flight. If not, a later backward does."""
        root_of(_state(self)).finalization.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards leave reductions in flight until :meth:`finalize_backward` is called, once per step.

        Raises:
            LifecycleError: the mode would change, and a backward has not been finalized.
        """
        now = root_of(_state(self)).finalization
        if enabled != now.is_manual and (now.is_due or now.in_flight is not None):
            raise LifecycleError(
                "set_manual_backward_finalization was called between a backward and the end of its finalization. Call "
                "finalize_backward() first, and wait() of its handle."
            )
        now.is_manual = enabled

    @runs_outside
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what is left after the backwards of a step, and set all sharded gradients. All ranks must call it.

        Parameters are freed as after a backward (:meth:`set_reshard_after_backward`). Gradients of modules without
        gradient synchronization stay unreduced. Call it on the root. Before the first forward it has no effect.

        Args:
            async_op: return a handle without waiting. Call its ``wait()`` before the optimizer's step.

        Raises:
            LifecycleError: this is not the root, backwards finalize themselves, a forward or backward runs, or the
                handle of the last finalization was not waited for.
        """
        state = _state(self)
        if state.root is None or not state.root.is_verified:
            return GradientReductionHandle(None) if async_op else None
        root = root_of(state)
        if state is not root.root_state:
            raise LifecycleError(f"finalize_backward() was called on {state.name!r}. Call it on the root module.")
        if not root.finalization.is_manual:
            raise LifecycleError(
                "finalize_backward() was called after a backward that has finalized itself. Call "
                "set_manual_backward_finalization(True) before the step."
            )
        if root.finalization.in_flight is not None:
            raise LifecycleError("finalize_backward() was called again. Call wait() of its last handle first.")
        synchronized = [each for each in _states(self, recurse=True) if each.is_synchronized]
        root.reduce_held("finalize_backward()", synchronized, frees=True)
        handle = GradientReductionHandle(root)
        if async_op:
            return handle
        handle.wait()
        return None

    @runs_outside
    def get_pending_gradients(
        self, *, recurse: bool = True
    ) -> dict[nn.Parameter, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return the gradients that are not in ``grad`` yet. Nothing is communicated.

        The tensors may be changed in place; the mapping is a copy.

        Args:
            recurse: of all sharded modules below this one too, and not only of its own group.

        Returns:
            for each sharded parameter with such gradients: this rank's full gradient, summed without gradient
            synchronization (a ``DTensor`` on a tensor-parallel mesh), and this rank's shard of gradients that are
            reduced over the shard axis only (``set_requires_all_reduce(False)``, or ``no_sync(sharded=True)``), or
            ``None``, in the dtype of the reduction. The shard is of the sum, and is divided later; but NCCL computes
            the mean over the shard axis by default, and fp16 sums are divided by a power of two already.
        """
        found: dict[nn.Parameter, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        for state in _states(self, recurse):
            found |= {each.sharded: parts for each, parts in state.group.held_gradients().items()}
        return found

    @runs_outside
    def synchronize_gradients(self, *, recurse: bool = True) -> None:
        """Reduce pending gradients and add them to ``grad``, also those of modules without gradient synchronization.

        All ranks must call it. Without pending gradients it has no effect.

        Args:
            recurse: of all sharded modules below this one too, and not only of its own group.

        Raises:
            LifecycleError: a forward or backward runs.
        """
        root = root_of(_state(self))
        root.reduce_held("synchronize_gradients()", _states(self, recurse))
        root.finish_reductions()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the summed gradients of this module's group by ``factor`` instead of by the number of ranks.

        The last microbatch of a sum decides: its factor divides also those before it that are not in ``grad`` yet.
        """
        check_factor(factor)
        _change_reduction(self, divide_factor=float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor
    """Older name."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives always sum and the division follows, even if the backend can average."""
        _change_reduction(self, sum_only=enable)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also all-reduces over the replicate axis of a hybrid mesh.

        If not, this rank accumulates its shards of the gradients, in the reduce dtype, until a backward that does.
        """
        _change(self, recurse, all_reduce=requires_all_reduce)

    @runs_outside
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether ranks may use different parameters in one step, or skip modules in forward or backward.

        All ranks then run the collectives of the sharded modules below the root in the order of registration, for
        modules that a rank skips with zero gradients. Each module must run at most once per forward, in that order, and
        the loss of every rank must depend on at least one of them. Each trainable parameter gets a gradient in each
        backward that synchronizes, zeros if no rank used it, to which an optimizer applies weight decay and momentum.
        Nothing is prefetched under a bound of ``set_schedule(max_unsharded_bytes=...)``.

        Without this setting, ranks may use different parameters of one group, as long as their backwards complete the
        groups in the same order. The ``grad`` of a parameter that no rank used then stays ``None``.

        Raises:
            LifecycleError: a forward has run whose backward may still come.
        """
        states = _states(self, recurse)
        check_between_steps("set_reduce_scatter_unused_params", states)
        for state in states:
            for pgs in state.group.process_groups:
                pgs.reduces_unused = reduce_scatter_unused_params
            state.rebuild()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many gradient reductions may be in flight at once. A further one first waits for the oldest.

        Each reduction in flight holds its input buffer in memory. The default is 1 on CPU. On accelerators it is as
        many as have together hardly more bytes than the gradients of the largest module among them, or than 1 MiB. The
        largest number set on any module of the root applies.

        Raises:
            ConfigurationError: not an int of at least 1.
        """
        check_count("max_input_buffers", max_input_buffers, least=1)
        _change(self, recurse, reductions_in_flight=max_input_buffers)

    @runs_outside
    def set_schedule(
        self,
        *,
        prefetch_limit: int | EllipsisType | None = ...,
        max_unsharded_bytes: int | EllipsisType | None = ...,
        max_fused_bytes: int | EllipsisType | None = ...,
        costs: EllipsisType = ...,
    ) -> None:
        """Set how far parameters are prefetched, and which messages groups share. Call it on the root.

        What is not given stays as it is; ``None`` goes back to the default. All ranks must give the same values.

        Args:
            prefetch_limit: how many groups are prefetched ahead of the running one, in forward and backward. The
                default is 1, which hides communication as long as an all-gather takes less time than the module before
                it computes. Higher limits help if it takes longer, and cost memory. On accelerators, the last groups of
                forward, one more than that, stay unsharded for backward. 0 prefetches nothing. Explicit prefetch lists
                still apply. Groups that share one all-gather count as one.
            max_unsharded_bytes: groups are prefetched, or kept for backward, only while all unsharded parameters
                together take at most that many bytes on this rank. The parameters of a module that runs are always
                gathered. ``None``, the default, sets no bound; 0 prefetches nothing.
            max_fused_bytes: how many bytes of full parameters of small, adjacent groups share one all-gather and one
                reduction. The default is 1 MiB; 0 fuses nothing. Groups of up to 512 KiB, or half of the limit if that
                is more, count as small. Groups are adjacent in the recorded order of the last forward, so fusion begins
                with the second forward. The unsharded parameters of a module are still registered only while it runs,
                but the memory of all fused groups is allocated when the first of them is gathered.

        Raises:
            ArgumentTypeError: a value has another type.
            ConfigurationError: a number is less than 0; or this module is not the root of modules that have already
                run.
            MissingNameError: ``costs``, which is gone: nothing is chosen by costs.
        """
        if costs is not ...:
            raise MissingNameError(f"set_schedule has no costs= in this version; {UNSUPPORTED['costs']}.")
        numbers = {
            "max_unsharded_bytes": max_unsharded_bytes,
            "prefetch_limit": prefetch_limit,
            "max_fused_bytes": max_fused_bytes,
        }
        given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not ...}
        for name, value in given.items():
            check_count(name, value, or_none=True)
        set_root_options(_state(self), given)

    def schedule(self) -> Schedule:
        """Return :func:`composable_fsdp.step_schedule` of this module."""
        return step_schedule(self)

    def set_order_check(self, level: Literal["off", "first", "always"]) -> None:
        """Set how often ranks compare, before a collective, that all of them are about to launch the same one.

        With gloo, a collective that ranks enter with different parameters ends the process, or mixes their values.
        Ranks that share memory always compare, at no cost. With other backends, such as NCCL, ranks compare through the
        store of the job; more than 64 ranks only at level ``"always"``. Call it on the root, with the same level on all
        ranks. ``COMPOSABLE_FSDP_ORDER_CHECK`` in the environment sets the level of all roots. Models that share a
        process group have one level, that of the last call or first forward.

        Args:
            level: ``"first"``, the default, compares an operation only if it has not followed the operation before it
                until now: in the first iteration, and after a change. ``"always"`` compares every operation. ``"off"``
                compares nothing, and does not warn when the order on this rank changes.

        Raises:
            ConfigurationError: ``level`` is none of these.
        """
        from composable_fsdp._consistency.order_check import order_check_from
        from composable_fsdp.plugins.watched_waits import compare

        chosen = order_check_from(level)
        states = _states(self, recurse=True)
        for state in states:
            state.change_for_plugin("order check", chosen)
        compare(connections(states), chosen)

    def set_in_place_check(self, level: Literal["off", "counted"], *, recurse: bool = True) -> None:
        """Set which changes of parameters since their forward raise ``LifecycleError`` in backward.

        Args:
            level: ``"counted"``, the default, finds in-place changes that torch counts, and optimizer steps; writes
                through ``.data`` are not counted. ``"off"`` finds none.
            recurse: apply the setting to the sharded modules below this one too.

        Raises:
            ConfigurationError: ``level`` is neither of these.
        """
        from composable_fsdp.plugins.checks.writes import set_in_place_check

        set_in_place_check(_states(self, recurse), level)

    # -- communication

    @runs_outside
    def set_custom_all_gather(self, comm: object) -> None:
        """Use ``comm`` for this module's all-gathers over its shard axis.

        Args:
            comm: a callable with a method ``allocate(size, *, dtype, device)``, which returns the 1-d output tensor. It
                is called with the keywords ``output_tensor``, ``input_tensor`` (both 1-d), ``group`` and ``async_op``,
                and returns a work or ``None``. ``async_op`` is ``True`` only in ``unshard(async_op=True)`` and after
                ``_set_unshard_async_op(True)``, as with FSDP2. On backends whose collectives block the host, a call
                that waits hides no communication.

        Raises:
            ArgumentTypeError: ``comm`` has no ``allocate`` or is not callable.
            LifecycleError: a forward has run whose backward may still come.
        """
        check_between_steps("set_custom_all_gather", [_state(self)])
        _custom_comm().choose([_state(self)], custom_gather=comm)
        _state(self).rebuild()

    @runs_outside
    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Use ``comm`` for this module's reduce-scatters over its shard axis.

        Gradients with a codec use an all-to-all instead and do not go through ``comm``.

        Args:
            comm: as for :meth:`set_custom_all_gather`. ``allocate`` returns the input and then the output; the reduced
                gradients stay in the output if they need no cast. The call has the keyword ``op`` and no ``async_op``.

        Raises:
            ArgumentTypeError: ``comm`` has no ``allocate`` or is not callable.
            LifecycleError: a forward has run whose backward may still come.
        """
        check_between_steps("set_custom_reduce_scatter", [_state(self)])
        _custom_comm().choose([_state(self)], custom_scatter=comm)
        _state(self).rebuild()

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """Call ``hook`` with this module's reduced gradients before they are set as ``grad``.

        Args:
            hook: takes a 1-d tensor in the reduce dtype: this rank's shards of all gradients with equal dtypes,
                concatenated without padding, zeros for a parameter without a gradient. It changes the tensor in place,
                for example by an all-reduce over ranks outside the mesh. Gradients are divided already, except after
                ``set_force_sum_reduction_for_comms(True)`` and for fp16 reductions, as with FSDP2. Called equally often
                on every rank. ``None`` removes the hook.
            stream: the stream on which the hook runs on an accelerator. ``None`` is the stream of the reduction.

        Raises:
            ArgumentTypeError: ``hook`` is not callable.
            ConfigurationError: ``stream`` was given on a 2-d mesh, where the hook runs on the stream of the all-reduce.
        """
        if hook is not None and not callable(hook):
            raise ArgumentTypeError(f"set_all_reduce_hook takes a function of a tensor, not {type(hook).__name__}.")
        state = _state(self)
        if stream is not None and any(pgs.axes.mesh.ndim > 1 for pgs in state.group.process_groups):
            raise ConfigurationError(
                f"set_all_reduce_hook on {state.name!r} takes no stream, as its mesh is 2-d (replicate, shard): the "
                "hook runs on the stream of the all-reduce over the replicate axis. Leave stream out."
            )
        _change_reduction(self, all_reduce_hook=hook if hook is None or stream is None else on_stream(hook, stream))

    def set_post_optim_event(self, event: Any) -> None:
        """Make the first all-gather of the next forward wait for ``event``, recorded after the optimizer's step."""
        root_of(_state(self)).post_optimizer_event = event

    @runs_outside
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reduce-scatters use a process group of their own, so that they do not queue behind all-gathers.

        Every rank must call it, at the same place.
        """
        _custom_comm().separate_scatter(_states(self, recurse), enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether communication buffers come from the allocator of the backend, if it has one (as NCCL has).

        That has no expandable segments, and shares no memory with torch's allocator.

        Raises:
            ConflictError: after ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, whose ``allocate`` decides.
        """
        state = _state(self)
        if _has_custom_collectives(state):
            raise ConflictError(
                f"set_allocate_memory_from_process_group_for_comm on {state.name!r}, which has a custom collective: "
                "its allocate() gives the memory of messages. Allocate there from the process group, or leave this out."
            )
        _custom_comm().choose([state], pooled=enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Do nothing, and log that once: messages are in ordinary memory. Results are the same."""
        _log_once(
            "set_symm_mem_for_comm has no effect in this version: messages are in ordinary memory. Results are the "
            "same. set_allocate_memory_from_process_group_for_comm() takes memory that the backend has registered."
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Set the ``async_op`` argument of custom all-gathers. Built-in all-gathers are always asynchronous."""
        _custom_comm().choose(_states(self, recurse=True), async_op=async_op)

    def _get_fsdp_state(self) -> Any:
        assert isinstance(self, nn.Module)
        return find_state(self)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Apply ``to``, ``cuda``, ``to_empty`` and the like to the sharded parameters, then update the groups."""
        states, unchanged = _states(self, recurse=True), []
        for state in states:
            state.drain_before_changes()
            if not takes_conversion(state.group, fn):
                unchanged.append(state)
        with ExitStack() as kept:
            for state in states:
                state.reshard()
                kept.enter_context(gradients_keep_their_dtype(state.group))
            with ExitStack() as hidden:
                for state in unchanged:
                    hidden.enter_context(state.group.registration.hidden())
                result = super(TorchFSDPModule, self)._apply(fn, *args, **kwargs)  # type: ignore[misc]
            for state in states:
                state.group.refresh()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as ``nn.Module.zero_grad`` does, pending ones too (:meth:`get_pending_gradients`)."""
        states = _states(self, recurse=True)
        for root in dict.fromkeys(each for state in states if (each := state.root) is not None):
            root.drain_before_zero()  # reductions in flight would set gradients later
        for state in states:
            group, parameters = state.group, _parameters_below(self, state)
            # Gradients that are not reduced; those of a failed backward cannot be kept as zeros.
            drops = set_to_none or group.gradient_state is GradientState.ARRIVING
            if drops and len(parameters) == len(group.parameters):
                group.drop_gradients()
            else:
                group.zero_gradients(parameters, set_to_none=set_to_none)
            # Those of sharded parameters that are not registered, which ``super`` does not see.
            if group.parameter_state is ParameterState.SHARDED and group.registration.is_current:
                continue
            for sharded in (parameter.sharded for parameter in parameters):
                if set_to_none:
                    sharded.grad = None
                elif sharded.grad is not None:
                    sharded.grad.zero_()
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an independent sharded module with the same parameters, gradients, buffers and settings.

        Accumulated gradients that were not reduced yet and residuals of ``ErrorFeedback`` are not copied.
        """
        assert isinstance(self, nn.Module)
        from composable_fsdp.plugins.deepcopy import copy_sharded  # few programs need it

        return copy_sharded(self, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "pickling a sharded module is not supported in this version; save its state_dict(), or model and optimizer "
            "with composable_fsdp.checkpoint.save."
        )


@contextmanager
def no_sync(module: nn.Module, *, sharded: bool = False) -> Iterator[None]:
    """Accumulate the gradients of backwards inside the context; the first backward after it sets the sum as ``grad``.

    Freezing or unfreezing a parameter of a group in between sets what the group has accumulated so far.

    Args:
        module: the model or a part of it. Applies to all sharded modules in it.
        sharded: ``False`` communicates nothing and keeps full gradients in the reduce dtype: 4 bytes per parameter
            for fp32, independent of the number of ranks. ``True`` reduce-scatters every microbatch and keeps only this
            rank's shard of the sum, in the reduce dtype; the all-reduce over replicas runs once, at the end.
    """
    before = [(state, state.options.accumulation) for state in _states(module, recurse=True)]
    _change(module, recurse=True, accumulation=Accumulation.SHARDED if sharded else Accumulation.UNSHARDED)
    try:
        yield
    finally:
        for state, accumulation in before:
            state.change(accumulation=accumulation)


def step_schedule(module: nn.Module | FSDPModule) -> Schedule:
    """Return the schedule of a training step: what happens at each event of forward and backward.

    ``print(step_schedule(model))`` shows it as a table. It is a dry run of an ordinary step, one backward after one
    forward in the order of the last one, the same on all ranks. Before a first forward it is empty.

    Args:
        module: the root.

    Raises:
        ArgumentTypeError: ``module`` is not sharded.
    """
    from composable_fsdp.plan.dry_run import schedule_of

    return schedule_of(root_of(_sharded_states("step_schedule", [module])[0]))


def share_comm_ctx(modules: Sequence[nn.Module | TorchFSDPModule]) -> None:
    """Make several roots, such as the pipeline stages of one rank, use the same streams.

    Args:
        modules: outermost sharded modules.

    Raises:
        ConfigurationError: a module is part of another root.
        ArgumentTypeError: a module is not sharded.
    """
    states = _sharded_states("share_comm_ctx", modules)
    for state in states:
        if root_of(state).root_state is not state:
            raise ConfigurationError(
                f"share_comm_ctx takes outermost sharded modules, but {state.name!r} is part of "
                f"{root_of(state).root_state.class_name}: pass that one."
            )
    for state in states[1:]:
        root_of(state).streams = root_of(states[0]).streams


def of_torch_alone() -> list[str]:
    """Return the public methods of the installed torch's class that ours lacks."""
    return [name for name in dir(TorchFSDPModule) if not name.startswith("_") and name not in vars(FSDPModule)]


for _name in of_torch_alone():
    setattr(FSDPModule, _name, property())  # has no getter, so that __getattr__ is called


def find_attribute(module: nn.Module, name: str) -> Any:
    """Look up ``name`` as ``nn.Module.__getattr__`` does, and say what replaces a method that is gone."""
    try:
        return nn.Module.__getattr__(module, name)
    except AttributeError:
        pass
    if name in RENAMED:
        raise MissingNameError(f"{name} is now model.{RENAMED[name]}.")
    if name in UNSUPPORTED:
        raise MissingNameError(f"{name} is not supported in this version; {UNSUPPORTED[name]}.")
    if name in vars(TorchFSDPModule):
        raise MissingNameError(
            f"{name} is a method of FSDPModule in torch {torch.__version__} that is not supported in this version. "
            "Leave it out, or shard the model by torch's own fully_shard."
        )
    if name in OF_FSDP1:
        raise MissingNameError(f"{name} is of FSDP1's wrapper. Use {OF_FSDP1[name]}.")
    if name.startswith("set_") and (meant := difflib.get_close_matches(name, vars(FSDPModule), 1, 0.8)):
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}. Did you mean {meant[0]!r}?")
    return nn.Module.__getattr__(module, name)  # raises


def _change_reduction(module: object, **settings: Any) -> None:
    group = _state(module).group
    group.reduction = group.reduction._replace(**settings)


def _state(module: object) -> FSDPState:
    assert isinstance(module, nn.Module)
    return state_of(module)


def _parameters_below(module: object, state: FSDPState) -> Sequence[ShardedParameter]:
    """Return the parameters of ``state`` that belong to ``module`` and the modules in it: not all of a list's."""
    if len(state.module_refs) == 1:
        return state.group.parameters
    assert isinstance(module, nn.Module)
    own = set(map(id, module.modules()))
    return [each for each in state.group.parameters if any(id(owner) in own for owner, _ in each.owners)]


def _states(module: object, recurse: bool) -> list[FSDPState]:
    assert isinstance(module, nn.Module)
    return states_below(module) if recurse else [state_of(module)]


def _change(module: object, recurse: bool, **options: object) -> list[FSDPState]:
    """Change ``options`` of the state of ``module``, or of all states below it. Return these."""
    states = _states(module, recurse)
    for state in states:
        state.change(**options)
    return states


def _sharded_states(taker: str, modules: Sequence[nn.Module | TorchFSDPModule]) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentTypeError(
                f"{taker} takes sharded modules, not {type(module).__name__}: call fully_shard on it first."
            )
    return [_state(module) for module in modules]


_log_once = functools.cache(logger.warning)


def _has_custom_collectives(state: FSDPState) -> bool:
    return not all(pgs.channels.can_be_shared for pgs in state.group.process_groups)


def _custom_comm() -> Any:
    from composable_fsdp.plugins import custom_comm

    return custom_comm
