"""Optimizer state that rests in host memory, and is on the device bucket by bucket during a step.

Invariant: between steps ``optimizer.state`` holds tensors in host memory, which can be read and written there. During a
step the tensors of at most two buckets are on the device, the one that is stepped and the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from composable_fsdp._core.memory import device_capabilities, group_by_key, is_host
from composable_fsdp._core.mesh import as_dtensor_at_zero
from composable_fsdp._core.params import local_part
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from composable_fsdp.optim._owner_exchange import is_planned
from composable_fsdp.optim._replaced_step import Step, replace_step, update_of, with_closure
from composable_fsdp.policies import checks_keywords

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_HOST = "cpu"
_MEMBERS = frozenset(("params", "param_names"))
_ALIGNMENT = 64


@checks_keywords
def offload_optimizer(
    optimizer: OptimizerT,
    to: str = _HOST,
    *,
    bucket_bytes: int = 64 << 20,
    pin_memory: bool = True,
) -> OptimizerT:
    """Make the state of ``optimizer`` rest in host memory, and come to the device for the step only.

    The parameters are cut into buckets by the bytes of their state. In a step, the optimizer's own ``step`` runs for
    one bucket after the other, while the state of the next one is fetched and that of the last one goes back. Results
    are bitwise those without it.

    All else is unchanged: hooks and closures run once for each step; schedulers, gradient scalers, ``state_dict``,
    ``load_state_dict`` and checkpoints see no difference, except that the tensors in ``state`` are in host memory.
    Numbers, tensors without dims and tensors of subclasses stay where they are. So does all state of parameters in host
    memory.

    Args:
        optimizer: an optimizer whose update of a parameter depends on that parameter, its gradient, its state and its
            group only; also one of :func:`local_optimizer` or :func:`owner_step`, or :class:`Muon`.
        to: ``"cpu"``, host memory: nothing else is supported.
        bucket_bytes: the bytes of state of a bucket on a rank. A larger parameter is a bucket of its own; one of
            :class:`Muon` and :func:`owner_step` may have as many bytes as the state of the largest whole matrix, so
            that each rank has one to compute. During a step, twice as many are on the device. The first step, which
            creates the state, takes it for twice the bytes of its parameters.
        pin_memory: page-lock the host memory, so that copies overlap with steps.

    Returns:
        The same object. Keep it: its ``step`` alone does not keep it alive.

    Raises:
        ArgumentTypeError: ``optimizer`` is no optimizer.
        ConfigurationError: an argument makes no sense, or the ``step`` of the object has been replaced by a scheduler.

    Example::

        optimizer = offload_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"offload_optimizer takes an optimizer, like torch.optim.AdamW(...), not {optimizer}.")
    if to != _HOST:
        raise ConfigurationError(
            f"offload_optimizer keeps state in host memory, so to must be 'cpu', not {str(to)!r}: this version has no "
            "files of state. Leave the argument out."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS steps all parameters together, so its state cannot be offloaded in buckets.")
    if bucket_bytes <= 0:
        raise ConfigurationError(f"bucket_bytes must be positive, not {bucket_bytes}.")
    if optimizer in _offloads:
        raise ConfigurationError(f"this {type(optimizer).__name__} is offloaded already. Call offload_optimizer once.")
    offload = _Offload(bucket_bytes, pin_memory)
    update = update_of(optimizer, "offload_optimizer", is_first=False)
    replace_step(optimizer, with_closure(update, partial(offload.carry_out, update)))
    optimizer.register_load_state_dict_pre_hook(offload.hold)
    optimizer.register_load_state_dict_post_hook(offload.take)
    _offloads[optimizer] = offload
    offload.cut(optimizer)
    return optimizer


_offloads: WeakKeyDictionary[Optimizer, _Offload] = WeakKeyDictionary()


# -- where state rests


class _Place(NamedTuple):
    """The place of a tensor in flat bytes."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.narrow(0, self.start, self.nbytes).view(self.dtype).as_strided(self.shape, self.strides)


def _places(leaves: Iterable[_Leaf]) -> tuple[list[_Place | None], int]:
    """Return the places of the tensors of ``leaves`` in flat bytes, and the bytes of all of them. None: it stays."""
    places: list[_Place | None] = []
    end = 0
    for leaf in leaves:
        local = local_part(leaf.tensor)
        if not _is_movable(leaf):
            places.append(None)
            continue
        strides = torch.empty_like(local, device="meta").stride()  # those of ``local`` if it is dense
        nbytes = local.numel() * local.dtype.itemsize
        places.append(_Place(end, nbytes, local.dtype, tuple(local.shape), strides))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


# -- the state of a parameter


class _Leaf(NamedTuple):
    """A tensor of the state, and where it is: ``container[key]``."""

    container: Any
    key: Any
    tensor: torch.Tensor

    def replace(self, local: torch.Tensor) -> torch.Tensor:
        """Put a tensor like this one with the local part ``local`` in its place, and return it."""
        old: Any = self.tensor
        new = as_dtensor_at_zero(local, old._spec) if isinstance(old, DTensor) else local
        self.container[self.key] = new
        return new


def _leaves(container: Any) -> Iterator[_Leaf]:
    """Yield the tensors with dims in nested dicts and lists."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        if isinstance(value, torch.Tensor):
            if value.ndim:
                yield _Leaf(container, key, value)
        elif isinstance(value, (dict, list)):
            yield from _leaves(value)


def _is_movable(leaf: _Leaf) -> bool:
    local = local_part(leaf.tensor)
    return type(local) is torch.Tensor and local.layout == torch.strided and local.numel() > 0


def _shards(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    placements = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in placements if not placement.is_replicate())


def _largest_bytes(tensor: torch.Tensor, shards: int) -> int:
    """Return the bytes of the largest of ``shards`` shards, about: the same on all ranks, so that they cut alike."""
    return -(-tensor.numel() // shards) * tensor.dtype.itemsize


def _exchanged(optimizer: Optimizer, members: Iterable[_Member]) -> list[torch.Tensor]:
    """Return the parameters of ``members`` that ranks exchange as whole matrices, to compute them."""
    is_exchanged = getattr(optimizer, "_is_exchanged", lambda _: False)
    return [member.parameter for member in members if is_exchanged(optimizer.param_groups[member.group])]


def _whole_bytes(optimizer: Optimizer, p: torch.Tensor) -> int:
    tensors = [leaf.tensor for leaf in _leaves(optimizer.state.get(p, {}))] or [p, p]
    return sum(_largest_bytes(tensor, 1) for tensor in tensors)


class _Member(NamedTuple):
    """A parameter, its group's number, and its number in the group."""

    parameter: torch.Tensor
    group: int
    number: int


class _Bucket:
    """Parameters whose state moves together.

    Attributes:
        members: the parameters.
        rest: the host memory in which the state rests, one dim, uint8. None if no state exists yet.
        resting: all tensors of the state at rest.
        places: where each of ``resting`` is in ``rest``, None for one that stays where it is.
        nbytes: the bytes of ``rest``.
    """

    def __init__(self, members: Iterable[_Member] = ()) -> None:
        self.members = list(members)
        self.rest: torch.Tensor | None = None
        self.resting: list[torch.Tensor] = []
        self.places: list[_Place | None] = []
        self.nbytes = 0

    @property
    def device(self) -> torch.device:
        return local_part(self.members[0].parameter).device

    @property
    def is_stepped(self) -> bool:
        """True if a parameter may have a gradient: the same on all ranks, which step whole matrices together."""
        return any(is_planned(member.parameter) for member in self.members)

    def leaves(self, optimizer: Optimizer) -> list[_Leaf]:
        state = optimizer.state
        return [leaf for p, *_ in self.members if p in state for leaf in _leaves(state[p])]

    def put(self, leaves: Sequence[_Leaf], flat: torch.Tensor) -> list[torch.Tensor]:
        """Have the state of ``leaves`` in ``flat``, which has its values. Return its tensors."""
        places = zip(leaves, self.places, strict=True)
        return [leaf.tensor if place is None else leaf.replace(place.of(flat)) for leaf, place in places]

    def restore(self, leaves: Sequence[_Leaf]) -> None:
        """Put the tensors at rest into the places of ``leaves``."""
        for leaf, tensor in zip(leaves, self.resting, strict=True):
            leaf.container[leaf.key] = tensor


def _are(leaves: Sequence[_Leaf], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors of ``leaves`` are ``tensors``."""
    return len(leaves) == len(tensors) and all(leaf.tensor is t for leaf, t in zip(leaves, tensors, strict=True))


class _Held:
    """Hides a tensor from ``load_state_dict``, which would copy it to the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Offload:
    """The buckets of one optimizer."""

    def __init__(self, bucket_bytes: int, pin_memory: bool) -> None:
        self.bucket_bytes, self.pin_memory = bucket_bytes, pin_memory
        self._resident = _Bucket()
        self._buckets: list[_Bucket] = []

    # -- at rest

    def cut(self, optimizer: Optimizer) -> None:
        """Cut all parameters into buckets, and put their state to rest."""
        groups = enumerate(optimizer.param_groups)
        members = [_Member(p, g, n) for g, group in groups for n, p in enumerate(group["params"])]
        self._resident = _Bucket()
        with torch.inference_mode(False), torch.no_grad():
            self._buckets = self._put_to_rest(optimizer, members)

    def _put_to_rest(self, optimizer: Optimizer, members: Sequence[_Member]) -> list[_Bucket]:
        """Cut ``members`` into buckets by the bytes of their state, and put it to rest, except in host memory."""
        buckets: list[_Bucket] = []
        filling: dict[Any, tuple[_Bucket, int]] = {}
        exchanged = {id(p): p for p in _exchanged(optimizer, members)}
        # A bucket has room for a matrix of each rank, which computes it.
        limit = max([self.bucket_bytes, *(_whole_bytes(optimizer, p) for p in exchanged.values())])
        for member in members:
            p = member.parameter
            leaves = list(_leaves(optimizer.state.get(p, {})))
            # Exchanges place state as the parameter. Until then, it may rest otherwise on ranks that have loaded it.
            nbytes = sum(_largest_bytes(t, _shards(p if id(p) in exchanged else t)) for *_, t in leaves)
            device = local_part(p).device
            if is_host(device):
                self._resident.members.append(member)
                continue
            nbytes = nbytes or 2 * _largest_bytes(p, _shards(p))
            key = device, p.device_mesh if isinstance(p, DTensor) else None  # the ranks of a mesh cut alike
            bucket, filled = filling.get(key, (None, 0))
            if bucket is None or filled + nbytes > limit:
                bucket, filled = _Bucket(), 0
                buckets.append(bucket)
            bucket.members.append(member)
            filling[key] = bucket, filled + nbytes
        for bucket in buckets:
            self._pack(bucket, bucket.leaves(optimizer))
        return buckets

    def _pack(self, bucket: _Bucket, leaves: list[_Leaf]) -> None:
        """Copy the state of ``bucket`` to where it rests."""
        bucket.places, bucket.nbytes = _places(leaves)
        if bucket.nbytes:
            bucket.rest = torch.empty(bucket.nbytes, dtype=torch.uint8, pin_memory=self.pin_memory)
            for leaf, place in zip(leaves, bucket.places, strict=True):
                if place is not None:
                    place.of(bucket.rest).copy_(local_part(leaf.tensor))
            bucket.resting = bucket.put(leaves, bucket.rest)
        else:
            bucket.resting = [leaf.tensor for leaf in leaves]

    # -- in a step

    @torch.inference_mode(False)
    @torch.no_grad()
    def carry_out(self, step: Step, optimizer: Optimizer, **options: Any) -> None:
        """Call ``step(optimizer, **options)`` for each bucket while its state is on the device."""
        update = _Update(optimizer, lambda: step(optimizer, **options))
        self._follow(optimizer)
        stepped = [bucket for bucket in self._buckets if bucket.is_stepped]
        others = [*self._resident.members, *(m for b in self._buckets if not b.is_stepped for m in b.members)]
        if others or not stepped:
            update(others)
        replaced: dict[int, list[_Bucket]] = {}
        for device, buckets in group_by_key([bucket.device for bucket in stepped], stepped):
            transfers = _Transfers(device, buckets)
            try:
                for number, bucket in enumerate(buckets):
                    staged = transfers.stage(number, bucket.leaves(optimizer))
                    try:
                        update(bucket.members)
                    finally:  # also after an update that failed halfway: the finished part counts
                        leaves = bucket.leaves(optimizer)
                        same = _are(leaves, staged)
                        if not same:  # new state, or another form of it
                            replaced[id(bucket)] = self._put_to_rest(optimizer, bucket.members)
                            bucket.rest, bucket.resting = None, []
                        transfers.send_back(number, leaves if same else None)
                        del leaves, staged  # which would keep state that was replaced during the next update
            finally:
                transfers.finish()
                self._replace(replaced)

    def _follow(self, optimizer: Optimizer) -> None:
        """Put to rest what has changed since the last step: other parameters, or other tensors in ``state``."""
        groups = optimizer.param_groups
        known = {(m.group, m.number): m.parameter for b in (self._resident, *self._buckets) for m in b.members}
        now = {(g, n): p for g, group in enumerate(groups) for n, p in enumerate(group["params"])}
        if known.keys() != now.keys() or any(known[at] is not now[at] for at in now):
            self.cut(optimizer)
            return
        changed = [bucket for bucket in self._buckets if not _are(bucket.leaves(optimizer), bucket.resting)]
        self._replace({id(bucket): self._put_to_rest(optimizer, bucket.members) for bucket in changed})

    def _replace(self, replaced: Mapping[int, list[_Bucket]]) -> None:
        """Replace buckets by others with the same parameters."""
        if replaced:
            self._buckets = [new for old in self._buckets for new in replaced.get(id(old), [old])]

    # -- load_state_dict

    def hold(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hide the tensors of ``state_dict`` from torch, which would copy all of them to the device."""
        entries = state_dict["state"].items()
        return {**state_dict, "state": {key: pytree.tree_map(_held, entry) for key, entry in entries}}

    def take(self, optimizer: Optimizer) -> None:
        """Put the tensors that were loaded to rest, in the dtype of their parameter, as torch loads them."""
        state: dict[Any, Any] = optimizer.state  # some optimizers have entries of no parameter
        for key, entry in state.items():
            dtype = key.dtype if isinstance(key, torch.Tensor) and key.is_floating_point() else None
            state[key] = pytree.tree_map(lambda value, to=dtype: _released(value, to), entry)
        self.cut(optimizer)


def _held(value: Any) -> Any:
    return _Held(value) if isinstance(value, torch.Tensor) and value.ndim else value


def _released(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, _Held):
        return value
    return value.tensor if dtype is None else value.tensor.to(dtype)


class _Update:
    """Calls the optimizer's update for some of its parameters at a time.

    Each call finds the settings of its groups as they were before the step: some optimizers count steps there.
    """

    def __init__(self, optimizer: Optimizer, update: Callable[[], Any]) -> None:
        self._optimizer, self._update = optimizer, update
        self._before = [{k: v for k, v in g.items() if k not in _MEMBERS} for g in optimizer.param_groups]

    def __call__(self, members: Iterable[_Member]) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        numbers: dict[int, list[int]] = {}
        for member in members:
            numbers.setdefault(member.group, []).append(member.number)
        whole = [{key: group[key] for key in _MEMBERS if key in group} for group in groups]
        try:
            for index, of_group in numbers.items():
                group = groups[index]
                for key in group.keys() - self._before[index].keys() - _MEMBERS:
                    del group[key]
                group.update(self._before[index])
                group.update({key: [each[n] for n in of_group] for key, each in whole[index].items()})
            optimizer.param_groups = [groups[index] for index in sorted(numbers)]
            self._update()
        finally:
            optimizer.param_groups = groups
            for group, members_of_group in zip(groups, whole, strict=True):
                group.update(members_of_group)


class _Transfers:
    """Brings the state of ``buckets``, all of one device, to it and back, in their order, on two streams.

    There are two slots on the device. A bucket takes that of the last but one, once that one has gone back.
    """

    def __init__(self, device: torch.device, buckets: Sequence[_Bucket]) -> None:
        self._buckets = buckets
        self._module = device_capabilities(device).module
        nbytes = max(bucket.nbytes for bucket in buckets)
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._in, self._out = self._module.Stream(), self._module.Stream()
        for stream in (self._in, self._out):
            stream.wait_stream(self._module.current_stream())  # the memory of the slots may be in use until now
        self._arrivals: list[Any] = []
        for number in range(2):
            self._fetch(number)

    def _fetch(self, number: int) -> None:
        """Copy the state of a bucket to its slot, after the one that had it has gone back."""
        if number < len(self._buckets):
            bucket = self._buckets[number]
            self._in.wait_stream(self._out)
            if bucket.rest is not None:
                with self._module.stream(self._in):
                    self._slots[number % 2][: bucket.nbytes].copy_(bucket.rest, non_blocking=True)
            self._arrivals.append(self._in.record_event())

    def stage(self, number: int, leaves: Sequence[_Leaf]) -> list[torch.Tensor]:
        """Put the state of a bucket on the device, and return its tensors. ``leaves`` are where it rests."""
        bucket = self._buckets[number]
        if bucket.rest is None:
            return bucket.resting
        self._module.current_stream().wait_event(self._arrivals[number])
        return bucket.put(leaves, self._slots[number % 2])

    def send_back(self, number: int, leaves: Sequence[_Leaf] | None) -> None:
        """Bring back the state of a bucket, which is in ``leaves``, unless it rests already. Fetch another one."""
        bucket = self._buckets[number]
        if leaves is not None and bucket.rest is not None:
            bucket.restore(leaves)
            self._out.wait_stream(self._module.current_stream())
            with self._module.stream(self._out):
                bucket.rest.copy_(self._slots[number % 2][: bucket.nbytes], non_blocking=True)
        self._fetch(number + 2)

    def finish(self) -> None:
        """Wait for everything."""
        for stream in (self._in, self._out):
            self._module.current_stream().wait_stream(stream)  # the memory of the slots returns to it
        self._out.synchronize()  # the host may read it next
