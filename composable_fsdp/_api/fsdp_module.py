"""``FSDPModule``: what a sharded module can do besides what it could before."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn

from composable_fsdp._api.deepcopy import copy_sharded
from composable_fsdp._api.direct_call_errors import explaining_methods
from composable_fsdp._api.group_setters import check_between_steps, check_count, check_factor, on_stream, tell_root
from composable_fsdp._comm.communicator import GroupCommunicator
from composable_fsdp._consistency.order_check import order_check_from
from composable_fsdp._runtime.groups.profiling import ask_logger
from composable_fsdp._runtime.groups.state import Accumulation, FSDPState, find_state, state_of
from composable_fsdp._runtime.groups.version_check import VersionCheck
from composable_fsdp._runtime.hooks import call_as_forward, is_being_called
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp._runtime.root.recovery import set_order_check
from composable_fsdp._torch_compat.fsdp_state import client_state
from composable_fsdp._torch_compat.torch_types import TorchFSDPModule, TorchUnshardHandle
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, ConflictError, UnsupportedError
from composable_fsdp.policies import Reshard

__all__ = ["FSDPModule", "UnshardHandle", "no_sync", "sharded_class", "share_comm_ctx"]


class UnshardHandle(TorchUnshardHandle):
    """An all-gather in flight, from ``FSDPModule.unshard(async_op=True)``."""

    def __init__(self, state: FSDPState, *, is_new: bool) -> None:
        self._state: FSDPState | None = state
        self._is_new = is_new

    def wait(self) -> None:
        """Makes the unsharded parameters usable. Waiting twice is waiting once."""
        if self._state is not None:
            state, self._state = self._state, None
            state.group.wait()
            if self._is_new:
                iteration_of(state).keep_unsharded(state)


class FSDPModule(TorchFSDPModule):
    """Mixed into the class of every module that ``fully_shard`` was applied to.

    Names and meanings are those of ``torch.distributed.fsdp.FSDPModule``. A setter counts from the next forward or
    backward; with ``recurse`` it also reaches the sharded modules below this one.
    """

    _orig_cls_mro_index = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds the *original* class, so that indexing or slicing a sharded container gives a plain one."""
        return cls.__mro__[cls._orig_cls_mro_index](*args, **kwargs)

    # -- parameters in and out of memory

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers this module's own group, without those of modules below it.

        Args:
            async_op: return at once with a handle; the module's next forward waits for it if nobody else did.
        """
        state = _state(self)
        state.deliver_before_changes()
        ask_logger()
        with state.group.unshard_async_op(async_op):
            is_new = iteration_of(state).gather_by_hand(state)
        handle = UnshardHandle(state, is_new=is_new)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's unsharded parameters. Without effect where they are sharded already."""
        _state(self).group.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: back to where a new step can begin.

        Completes collectives in flight, shards every group of the root again, and drops gradients that have not been
        reduced, those accumulated with ``set_requires_gradient_sync(False)`` included. Reduced gradients stay: call
        ``zero_grad`` as usual, and repeat the step from its first microbatch: what ``ErrorFeedback`` remembers is as it
        was before the step. All ranks must call it: they wait for each other.

        Raises:
            PeerError: some ranks did not come within the timeout of the process group. Named in the text.
            DivergenceError: some ranks took the optimizer's step after a backward that failed on others. Load a
                checkpoint on all of them; nothing else is needed to go on.
        """
        iteration_of(_state(self)).reset()

    # -- when to reshard and what to prefetch

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free parameters after forward and gather them again in backward.

        Raises:
            ArgumentTypeError: not a ``bool``. A smaller mesh is chosen by ``fully_shard(reshard_after_forward=n)``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentTypeError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}; to reshard to a smaller mesh, "
                "pass an int as fully_shard(reshard_after_forward=...)."
            )
        for state in _states(self, recurse):
            state.reshard = Reshard.parse(reshard_after_forward, state.group.axes.shard.size)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free parameters after backward. Kept ones are gathered anew once an optimizer has stepped, but for
        groups that are frozen as a whole: these are gathered once, and again only when they have been changed in place.
        """
        for state in _states(self, recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Modules to all-gather when this one begins its forward, in place of those known from the last iteration."""
        _state(self).forward_prefetch = list(map(ref, _sharded_states("set_modules_to_forward_prefetch", modules)))

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Modules to all-gather when this one begins its backward, in place of the one before it in forward."""
        _state(self).backward_prefetch = list(map(ref, _sharded_states("set_modules_to_backward_prefetch", modules)))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the parameters; an embedding's does not, which saves its second all-gather."""
        _state(self).unshard_in_backward = unshard_in_backward

    # -- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Where it does not, they are summed unsharded, in the reduce dtype.

        See :func:`no_sync` for a way that needs only this rank's shard of memory.
        """
        for state in _states(self, recurse):
            state.accumulation = Accumulation.REDUCE if requires_gradient_sync else Accumulation.UNSHARDED
            state.all_reduce = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward waits for reductions in flight; without it, the next backward's does."""
        iteration_of(_state(self)).is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the summed gradients of this module's group by ``factor`` instead of by the number of ranks."""
        check_factor(factor)
        _state(self).group.gradients.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether to sum on the wire and divide afterwards, also where the backend could average."""
        _state(self).group.gradients.sum_only = enable

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the replicate axis of a hybrid mesh too.

        Where it does not, this rank's shards of the gradients are summed, in the reduce dtype, until a backward does.
        """
        for state in _states(self, recurse):
            state.all_reduce = requires_all_reduce

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether ranks may use different parameters in the same step, or skip modules in forward or backward.

        All ranks then go through the sharded modules below the root in the order in which these are registered, and a
        rank takes part in the collectives of what it skips, with zero gradients. So each must run at most once per
        forward, in that order, and every rank's loss must depend on some of them. Every trainable parameter of these
        modules gets a gradient in each backward that synchronises: zeros if no rank used it. An optimizer then treats
        it like any other, with weight decay and momentum. Nothing is gathered ahead where ``set_max_unsharded_bytes``
        sets a bound.

        Without it, ranks may use different parameters of one group, as long as their backwards complete the groups in
        the same order. A parameter that no rank used then keeps ``grad`` ``None``.

        Raises:
            LifecycleError: a backward may still come to a forward that has run.
        """
        states = list(_states(self, recurse))
        check_between_steps("set_reduce_scatter_unused_params", states)
        for state in states:
            for pgs in state.group.process_groups:
                pgs.unequal_use = reduce_scatter_unused_params
            state.group.rebuild()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions of gradients may be on the wire at once: one more waits for the oldest.

        Each has its message in memory. Unless told, on CPU one; on accelerators as many as have together hardly more
        bytes than the gradients of the largest module among them, or than 1 MiB. Of the numbers that several modules
        are given, the largest counts. A large module's gradients travel in several reductions.

        Raises:
            ConfigurationError: not an int of at least 1.
        """
        check_count("max_input_buffers", max_input_buffers, least=1)
        for state in _states(self, recurse):
            state.reductions_in_flight = max_input_buffers

    def set_prefetch_limit(self, limit: int) -> None:
        """How many modules are gathered ahead of the one that computes, forward and backward. Call it on the root.

        1 unless told: that hides communication as long as the wire is faster than the modules. Where it is not, more
        are worth the memory that each takes. On accelerators as many of the last modules stay from forward to backward.
        0 gathers nothing ahead. ``set_max_unsharded_bytes`` still holds, and so do lists of modules to prefetch. Small
        groups that are gathered together (``set_max_merged_bytes``) count as one. The same on every rank.

        Raises:
            ConfigurationError: not an int of at least 0, or this module is not the root of what has run already.
        """
        check_count("limit", limit)
        tell_root(_state(self), "prefetch_limit", limit)

    def set_max_unsharded_bytes(self, max_unsharded_bytes: int | None) -> None:
        """Bounds the memory of parameters that are gathered ahead of their turn. Call it on the root.

        What a module needs is always gathered. Others are gathered ahead, while it computes, or stay for backward, only
        where all unsharded parameters together then take at most ``max_unsharded_bytes`` on this rank. The same on
        every rank.
        ``None``, as it is at first, sets no bound; 0 gathers nothing ahead.

        Raises:
            ConfigurationError: not an int of at least 0, nor ``None``; or this module is not the root of what has run
                already.
        """
        check_count("max_unsharded_bytes", max_unsharded_bytes, or_none=True)
        tell_root(_state(self), "max_unsharded_bytes", max_unsharded_bytes)

    def set_max_merged_bytes(self, max_merged_bytes: int) -> None:
        """How many bytes of full parameters of small groups next to each other share one all-gather and one reduction.

        1 MiB unless told; 0 merges nothing. Groups count as small up to 512 KiB. They are found in the order in which
        the last forward ran, so merging begins with the second. Nothing else changes: each module still shows its
        unsharded parameters only while it runs, though all that came together take memory from the first one's turn.
        Call it on the root, with the same number on every rank.

        Raises:
            ConfigurationError: not an int of at least 0, or this module is not the root of what has run already.
        """
        check_count("max_merged_bytes", max_merged_bytes)
        tell_root(_state(self), "max_merged_bytes", max_merged_bytes)

    def set_order_check(self, level: str) -> None:
        """How much ranks compare, before a collective begins, to see that all of them are about to do the same.

        Over gloo, a collective that ranks enter with different parameters kills the process, or mixes them. In shared
        memory ranks always compare, at no cost. With other backends nothing is compared.

        Args:
            level: ``"first"``, what is done unless told, compares what has not followed the operation before it until
                now: the first iteration, and what changes later. ``"always"`` compares each time. ``"off"`` trusts
                the ranks, and does not warn when this one's order changes. The environment variable
                ``COMPOSABLE_FSDP_ORDER_CHECK`` says it for all roots. Call it on the root, with the same on all ranks.
                Of several models over one process group, the level of the one that was told, or began its first
                forward, last counts for all.

        Raises:
            ConfigurationError: none of these.
        """
        chosen, states = order_check_from(level), list(_states(self, recurse=True))
        for state in states:
            state.order_check = chosen
        set_order_check(states, chosen)

    def set_version_check(self, enable: bool = True, *, recurse: bool = True) -> None:
        """How parameters that change between a forward and its backward are looked for.

        By default a change in place that torch counts, or a step of an optimizer, is a ``LifecycleError`` in backward:
        the gradients would be those of a model that never ran. Writes through ``.data`` are not counted.

        Args:
            enable: ``True`` finds these too: all shards are read twice in each step, and the host waits for that.
                ``False`` looks for no change.
            recurse: also in the sharded modules below this one.
        """
        for state in _states(self, recurse):
            state.version_check = VersionCheck(state.group, reads_shards=True) if enable else None

    # -- communication

    def set_custom_all_gather(self, comm: object) -> None:
        """Lets ``comm`` move the bytes of this module's all-gathers over its shard axis.

        Args:
            comm: has ``allocate(size, *, dtype, device)``, which gives the 1-d output, and is called with keywords
                ``output_tensor``, ``input_tensor`` (1-d), ``group`` and ``async_op``; returns a work or ``None``.
                ``async_op`` is ``False``, but ``True`` in ``unshard(async_op=True)`` and after
                ``_set_unshard_async_op(True)``, as with FSDP2. Where ranks wait for collectives on the host, a call
                that waits hides no communication.

        Raises:
            ArgumentTypeError: ``comm`` lacks ``allocate`` or cannot be called.
            LifecycleError: a backward may still come to a forward that has run.
        """
        check_between_steps("set_custom_all_gather", [_state(self)])
        for pgs in _state(self).group.process_groups:
            pgs.customize_gather(comm)
        _state(self).group.rebuild()

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Lets ``comm`` move the bytes of this module's reduce-scatters over its shard axis.

        Gradients with a codec or hooks of their own are exchanged instead, and do not go through ``comm``.

        Args:
            comm: as for :meth:`set_custom_all_gather`; ``allocate`` gives the input and then the output, in which the
                reduced gradients stay where they need no cast. The call has keyword ``op`` and no ``async_op``.

        Raises:
            ArgumentTypeError: ``comm`` lacks ``allocate`` or cannot be called.
            LifecycleError: a backward may still come to a forward that has run.
        """
        check_between_steps("set_custom_reduce_scatter", [_state(self)])
        for pgs in _state(self).group.process_groups:
            pgs.customize_scatter(comm)
        _state(self).group.rebuild()

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """Calls ``hook`` with this module's reduced gradients before they are set.

        Args:
            hook: gets a 1-d tensor of this rank's shards of all gradients that share their dtypes, one after the other
                and nothing else, in the reduce dtype; zeros for a parameter without gradient. It changes the tensor
                in place, for example by an all-reduce over ranks outside the mesh. The gradients are divided already,
                but not after ``set_force_sum_reduction_for_comms(True)`` or where they are reduced in fp16, as with
                FSDP2. Every rank calls it equally often. ``None`` takes it off.
            stream: where the hook runs on an accelerator; ``None`` is the stream of the reduction.

        Raises:
            ArgumentTypeError: ``hook`` cannot be called.
            ConfigurationError: ``stream`` on a 2-d mesh, where the hook follows the all-reduce on its stream.
        """
        if hook is not None and not callable(hook):
            raise ArgumentTypeError(f"set_all_reduce_hook takes a function of a tensor, not {type(hook).__name__}.")
        state = _state(self)
        if stream is not None and any(pgs.axes.mesh.ndim > 1 for pgs in state.group.process_groups):
            raise ConfigurationError(
                f"set_all_reduce_hook on {state.name!r} takes no stream, as its mesh is 2-d (replicate, shard): the "
                "hook runs on the stream of the all-reduce over the replicate axis. Leave stream out."
            )
        state.group.gradients.all_reduce_hook = hook if hook is None or stream is None else on_stream(hook, stream)

    def set_post_optim_event(self, event: Any) -> None:
        """Makes the first all-gather of the next forward wait for ``event``, recorded after the optimizer's step."""
        iteration_of(_state(self)).post_optimizer_event = event

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters have process groups of their own, so that they do not queue behind all-gathers.

        Every rank must call it, at the same place.
        """
        separate: dict[object, GroupCommunicator] = {}
        for state in _states(self, recurse):
            for pgs in state.group.process_groups:
                pgs.separate_scatter(separate if enable else None)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether messages lie in memory of the backend's own allocator, where it has one, as NCCL has.

        Raises:
            ConflictError: after ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, whose ``allocate`` decides.
        """
        state = _state(self)
        if any(pgs.is_custom for pgs in state.group.process_groups):
            raise ConflictError(
                f"set_allocate_memory_from_process_group_for_comm on {state.name!r}, which has a custom collective: "
                "its allocate() gives the memory of messages. Allocate there from the process group, or leave this out."
            )
        for pgs in state.group.process_groups:
            pgs.pool(enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not offered yet: raises ``UnsupportedError``."""
        _unsupported("set_symm_mem_for_comm", "use set_allocate_memory_from_process_group_for_comm")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """The ``async_op`` that custom all-gathers are called with. Ours are always asynchronous."""
        for state in _states(self, recurse=True):
            for pgs in state.group.process_groups:
                pgs.unshard_async_op = async_op

    def _get_fsdp_state(self) -> Any:
        assert isinstance(self, nn.Module)
        return client_state(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``to_empty`` … act on the sharded parameters; the groups take over what came of them."""
        for state in _states(self, recurse=True):
            state.deliver_before_changes()
            state.group.check_nothing_held()
            state.group.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for state in _states(self, recurse=True):
            state.group.refresh()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; also drops gradients that were accumulated and not delivered yet."""
        states = list(_states(self, recurse=True))
        for iteration in {iteration_of(state) for state in states if state.iteration is not None}:
            iteration.drain()  # what is on the wire would arrive later
        for state in states:
            state.group.gradients.drop()
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An independent sharded module with the same values: parameters, gradients, buffers, choices.

        Gradients that were accumulated and not delivered yet, and what ``ErrorFeedback`` remembers, do not come along.
        """
        assert isinstance(self, nn.Module)
        return copy_sharded(self, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _unsupported(
            "pickling a sharded module",
            "save its state_dict(), or model and optimizer with composable_fsdp.checkpoint.save",
        )


@contextmanager
def no_sync(module: nn.Module, *, sharded: bool = False) -> Iterator[None]:
    """Backwards inside accumulate; the first one after it delivers the sum to the sharded parameters.

    Args:
        module: the model, or a part of it; all sharded modules in it take part.
        sharded: ``False`` communicates nothing and keeps gradients in full, in the reduce dtype: 4 bytes per parameter
            for fp32, however many ranks there are. ``True`` reduce-scatters every microbatch and keeps only this rank's
            shard of the sum, in the reduce dtype; replicas are not reduced over until the end.

    To freeze or thaw parameters of a group in between delivers what the group has summed so far.
    """
    states = list(_states(module, recurse=True))
    before = [state.accumulation for state in states]
    for state in states:
        state.accumulation = Accumulation.SHARDED if sharded else Accumulation.UNSHARDED
    try:
        yield
    finally:
        for state, accumulation in zip(states, before, strict=True):
            state.accumulation = accumulation


def share_comm_ctx(modules: Sequence[nn.Module | TorchFSDPModule]) -> None:
    """Makes several roots, such as the chunks of a pipeline on one rank, use the same streams.

    Args:
        modules: sharded modules that no other sharded module contains.

    Raises:
        ConfigurationError: one of them is not sharded, or part of another root.
    """
    states = _sharded_states("share_comm_ctx", modules)
    for state in states:
        if iteration_of(state).root is not state:
            raise ConfigurationError(
                f"share_comm_ctx takes outermost sharded modules, but {state.name!r} is part of "
                f"{iteration_of(state).root.class_name}: pass that one."
            )
    for state in states[1:]:
        iteration_of(state).streams = iteration_of(states[0]).streams


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``FSDPModule`` and ``original`` that sharded modules of that class get. One per class."""
    if original not in _classes:
        body: dict[str, Any] = {"__module__": original.__module__, "__doc__": original.__doc__}
        body.update(explaining_methods(original))
        if original.forward is not nn.Module.forward:
            body["forward"] = _hooked_forward(original.forward)
        made = types.new_class(
            f"FSDP{original.__name__}", (FSDPModule, original), exec_body=lambda namespace: namespace.update(body)
        )
        _classes.setdefault(original, made)  # another thread may have been first
    return _classes[original]


def _hooked_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which also brings the parameters into memory when it is called without ``__call__``."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_being_called(state_of(self)):
            return original(self, *args, **kwargs)
        return call_as_forward(state_of(self), self, functools.partial(original, self), args, kwargs)

    return forward


def _state(module: object) -> FSDPState:
    assert isinstance(module, nn.Module)
    return state_of(module)


def _states(module: object, recurse: bool) -> Iterator[FSDPState]:
    assert isinstance(module, nn.Module)
    if not recurse:
        yield state_of(module)
        return
    yield from {state: None for child in module.modules() if (state := find_state(child)) is not None}


def _sharded_states(taker: str, modules: Sequence[nn.Module | TorchFSDPModule]) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentTypeError(
                f"{taker} takes sharded modules, not {type(module).__name__}: call fully_shard on it first."
            )
    return [_state(module) for module in modules]


def _unsupported(what: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{what} is not supported in this version; {instead}.")
