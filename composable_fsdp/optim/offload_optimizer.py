"""Optimizer state that rests in host memory, and is on the device bucket by bucket during a step.

Invariant: between steps ``optimizer.state`` holds tensors in host memory, which can be read and written there. During a
step the tensors of at most two buckets are on the device, the one that is stepped and the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from composable_fsdp._core.layout import aligned_bytes
from composable_fsdp._core.memory import device_capabilities, group_by_key, is_host
from composable_fsdp._core.mesh import as_dtensor_at_zero
from composable_fsdp._core.params import local_part
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from composable_fsdp.optim._replaced_step import Step, replace_step, update_of, with_closure
from composable_fsdp.optim.local_optimizer import is_elementwise, on_shards
from composable_fsdp.optim.muon import Muon
from composable_fsdp.policies import checks_keywords

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_REST = torch.device("cpu")
"""The device on which state rests."""


@checks_keywords
def offload_optimizer(optimizer: OptimizerT, *, bucket_bytes: int = 64 << 20, pin_memory: bool = True) -> OptimizerT:
    """Make the state of ``optimizer`` rest in host memory, and come to the device for the step only.

    The parameters are cut into buckets by the bytes of their state. In a step, the optimizer's own ``step`` runs for
    one bucket after the other, while the state of the next one is fetched and that of the last one goes back. Results
    are bitwise those without it. Optimizers that ``local_optimizer`` knows step on local shards.

    All else is unchanged: hooks and closures run once for each step; schedulers, gradient scalers, ``state_dict``,
    ``load_state_dict`` and checkpoints see no difference, except that the tensors in ``state`` are in host memory.
    Numbers, tensors without dims and tensors of subclasses stay where they are. So does all state of parameters in host
    memory.

    Args:
        optimizer: an optimizer whose update of a parameter depends on that parameter, its gradient, its state and its
            group only. Not one of :func:`local_optimizer` or :func:`owner_step`, nor :class:`Muon`.
        bucket_bytes: the bytes of state of a bucket on a rank. A larger parameter is a bucket of its own. During a
            step, twice as many are on the device. The first step, which creates the state, takes it for twice the bytes
            of its parameters.
        pin_memory: page-lock the host memory, so that copies overlap with steps.

    Returns:
        The same object. Keep it: its ``step`` alone does not keep it alive.

    Raises:
        ArgumentTypeError: ``optimizer`` is no optimizer.
        ConfigurationError: an argument makes no sense, or the ``step`` of the object has been replaced already.

    Example::

        optimizer = offload_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"offload_optimizer takes an optimizer, like torch.optim.AdamW(...), not {optimizer}.")
    if isinstance(optimizer, (torch.optim.LBFGS, Muon)):
        raise ConfigurationError(
            f"{type(optimizer).__name__} steps its parameters together, so its state cannot be offloaded in buckets. "
            "Use it as it is; fully_shard(offload_policy=CPUOffloadPolicy()) keeps parameters and state in host memory."
        )
    if bucket_bytes <= 0:
        raise ConfigurationError(f"bucket_bytes must be positive, not {bucket_bytes}.")
    update = update_of(optimizer, "offload_optimizer")
    step = on_shards(update) if is_elementwise(optimizer) else update
    offload = _Offload(step, bucket_bytes, pin_memory)
    replace_step(optimizer, with_closure(update, offload.carry_out))
    optimizer.register_load_state_dict_pre_hook(_hold)
    optimizer.register_load_state_dict_post_hook(offload.take)
    offload.rest(optimizer)
    return optimizer


# -- the state of a parameter


class _Leaf(NamedTuple):
    """A tensor of the state that can be moved, and where it is: ``container[key]``."""

    container: Any
    key: Any
    tensor: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        return local_part(self.tensor)

    def replace(self, local: torch.Tensor) -> torch.Tensor:
        """Put a tensor like this one with the local part ``local`` in its place, and return it."""
        old: Any = self.tensor
        new = as_dtensor_at_zero(local, old._spec) if isinstance(old, DTensor) else local
        self.container[self.key] = new
        return new


def _leaves(container: Any) -> Iterator[_Leaf]:
    """Yield the movable tensors in nested dicts and lists. Those without dims and those of subclasses are not."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        if isinstance(value, (dict, list)):
            yield from _leaves(value)
        elif isinstance(value, torch.Tensor) and value.ndim:
            local = local_part(value)
            if type(local) is torch.Tensor and local.layout == torch.strided:
                yield _Leaf(container, key, value)


def _largest_bytes(tensor: torch.Tensor) -> int:
    """Return about the bytes of the largest shard: all ranks must cut alike, since updates may have collectives."""
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True) if isinstance(tensor, DTensor) else ()
    return -(-tensor.numel() // prod(size for size, at in placed if not at.is_replicate())) * tensor.dtype.itemsize


class _Bucket(NamedTuple):
    """Parameters that are stepped together: those of each group. ``device`` is None if their state does not move."""

    device: torch.device | None
    parameters: list[list[torch.Tensor]]

    def leaves(self, optimizer: Optimizer) -> list[_Leaf]:
        state = optimizer.state
        return [leaf for of_group in self.parameters for p in of_group if p in state for leaf in _leaves(state[p])]


# -- in a step


class _Offload:
    """The step of an optimizer with state in host memory. Nothing of parameters or state is kept between steps."""

    def __init__(self, step: Step, bucket_bytes: int, pin_memory: bool) -> None:
        self._step, self._bucket_bytes, self._pin_memory = step, bucket_bytes, pin_memory
        self._unused = torch.empty(0, dtype=torch.uint8)
        """Host memory in which no state rests yet."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def carry_out(self, optimizer: Optimizer, **options: Any) -> None:
        """Call ``step(optimizer, **options)`` for each bucket while its state is on the device."""
        groups = optimizer.param_groups
        before = [dict(group) for group in groups]

        def update(bucket: _Bucket) -> None:
            # Each bucket finds the settings as they were before the step: some optimizers count steps there.
            optimizer.param_groups = []
            for group, settings, parameters in zip(groups, before, bucket.parameters, strict=True):
                if parameters:
                    group.clear()
                    group.update(settings, params=parameters)
                    optimizer.param_groups.append(group)
            self._step(optimizer, **options)

        try:
            buckets = self._cut(optimizer)
            for device, of_device in group_by_key([bucket.device for bucket in buckets], buckets):
                if device is None:
                    update(of_device[0])
                else:
                    self._step_on(device, of_device, optimizer, update)
        finally:
            optimizer.param_groups = groups
            for group, settings in zip(groups, before, strict=True):
                group["params"] = settings["params"]

    def _cut(self, optimizer: Optimizer) -> list[_Bucket]:
        """Return the buckets: first that of the parameters whose state does not move, or which have no gradient."""
        groups = optimizer.param_groups
        buckets = [_Bucket(None, [[] for _ in groups])]
        filled = 0
        for index, group in enumerate(groups):
            for p in group["params"]:
                local = local_part(p)
                if p.grad is None or is_host(local.device):
                    buckets[0].parameters[index].append(p)
                    continue
                state = [_largest_bytes(leaf.tensor) for leaf in _leaves(optimizer.state.get(p, {}))]
                nbytes = sum(state) or 2 * _largest_bytes(p)
                if buckets[-1].device != local.device or filled + nbytes > self._bucket_bytes:
                    buckets.append(_Bucket(local.device, [[] for _ in groups]))
                    filled = 0
                buckets[-1].parameters[index].append(p)
                filled += nbytes
        # Without any other bucket the first one is stepped too, as an optimizer without gradients is.
        return buckets if any(buckets[0].parameters) or len(buckets) == 1 else buckets[1:]

    def _step_on(
        self, device: torch.device, buckets: list[_Bucket], optimizer: Optimizer, update: Callable[[_Bucket], None]
    ) -> None:
        """Step ``buckets``, whose state comes to ``device`` and goes back on two streams.

        There are two slots on the device. A bucket takes that of the last but one, once that one has gone back.
        """
        # State that others have put on the device stays there for this step, and rests after it.
        resting = [[leaf for leaf in bucket.leaves(optimizer) if leaf.local.device == _REST] for bucket in buckets]
        nbytes = max(sum(aligned_bytes(leaf.local.nbytes) for leaf in leaves) for leaves in resting)
        slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        staged = [_in_flat(slots[number % 2], leaves) for number, leaves in enumerate(resting)]
        module = device_capabilities(device).module
        current, incoming, outgoing = module.current_stream(), module.Stream(), module.Stream()
        for stream in (incoming, outgoing):
            stream.wait_stream(current)  # the memory of the slots may be in use until now
        arrivals: list[Any] = []

        def fetch(number: int) -> None:
            if number < len(buckets):
                incoming.wait_stream(outgoing)
                with module.stream(incoming):
                    for leaf, copy in zip(resting[number], staged[number], strict=True):
                        copy.copy_(leaf.local, non_blocking=True)
                arrivals.append(incoming.record_event())

        def send_back(number: int, rest_of: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
            outgoing.wait_stream(current)
            for leaf in buckets[number].leaves(optimizer):
                if id(leaf.tensor) not in rest_of:  # new state, or another form of it
                    self._rest(leaf)
                    continue
                _, rest = rest_of[id(leaf.tensor)]
                with module.stream(outgoing):
                    local_part(rest).copy_(leaf.local, non_blocking=True)
                leaf.container[leaf.key] = rest

        try:
            fetch(0)
            fetch(1)
            for number, bucket in enumerate(buckets):
                current.wait_event(arrivals[number])
                copies = [leaf.replace(copy) for leaf, copy in zip(resting[number], staged[number], strict=True)]
                rest_of = {id(c): (c, leaf.tensor) for c, leaf in zip(copies, resting[number], strict=True)}
                try:
                    update(bucket)
                finally:  # also after an update that failed halfway: the finished part counts
                    send_back(number, rest_of)
                fetch(number + 2)
        finally:
            for stream in (incoming, outgoing):
                current.wait_stream(stream)  # the memory of the slots returns to it
            outgoing.synchronize()  # the host may read it next

    # -- at rest

    def rest(self, optimizer: Optimizer) -> None:
        """Put all state to rest in memory of its own, except that of parameters in host memory."""
        with torch.inference_mode(False), torch.no_grad():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if p in optimizer.state and not is_host(local_part(p).device):
                    for leaf in _leaves(optimizer.state[p]):
                        self._rest(leaf)

    def _rest(self, leaf: _Leaf) -> None:
        # Torch rounds page-locked memory up to a power of two, so tensors are put together.
        if (nbytes := aligned_bytes(leaf.local.nbytes)) > self._unused.numel():
            nbytes_of_block = max(nbytes, self._bucket_bytes)
            self._unused = torch.empty(nbytes_of_block, dtype=torch.uint8, pin_memory=self._pin_memory)
        (place,) = _in_flat(self._unused, [leaf])
        self._unused = self._unused[nbytes:]
        leaf.replace(place.copy_(leaf.local))

    def take(self, optimizer: Optimizer) -> None:
        """Put the tensors that were loaded to rest, in the dtype of their parameter, as torch loads them."""
        state: dict[Any, Any] = optimizer.state  # some optimizers have entries of no parameter
        for key, entry in state.items():
            state[key] = pytree.tree_map_only(_Held, partial(_loaded, key), entry)
        self.rest(optimizer)


def _in_flat(flat: torch.Tensor, leaves: Iterable[_Leaf]) -> list[torch.Tensor]:
    """Return a tensor like each of ``leaves`` in the bytes ``flat``."""
    tensors, start = [], 0
    for leaf in leaves:
        local = leaf.local
        strides = torch.empty_like(local, device="meta").stride()  # those of ``local`` if it is dense
        tensors.append(flat.narrow(0, start, local.nbytes).view(local.dtype).as_strided(local.shape, strides))
        start += aligned_bytes(local.nbytes)
    return tensors


# -- load_state_dict


class _Held:
    """Hides a tensor from ``load_state_dict``, which would copy it to the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _loaded(key: object, held: _Held) -> torch.Tensor:
    return held.tensor.to(key.dtype) if isinstance(key, torch.Tensor) and key.is_floating_point() else held.tensor


def _hold(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    held = pytree.tree_map_only(torch.Tensor, lambda t: _Held(t) if t.ndim else t, state_dict["state"])
    return {**state_dict, "state": held}
