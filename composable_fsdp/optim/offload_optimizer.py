"""Optimizer state that rests in host memory or in files, and is on the device bucket by bucket during a step.

Invariant: between steps ``optimizer.state`` holds tensors in the memory where they rest, which can be read and written
there by operations of torch: a file is mapped. During a step the tensors of at most two buckets are on the device, the
one that is stepped and the next one. Where the device is the host, a file is stepped in its mapping, so that nothing is
copied; a thread has read the pages before, and takes them out of the process's memory afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from math import inf, prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from composable_fsdp._core.memory import device_capabilities, group_by_key, is_host
from composable_fsdp._core.mesh import as_dtensor_at_zero
from composable_fsdp._core.params import local_part
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, PeerError, StorageError
from composable_fsdp.optim._owner_exchange import is_planned, without_gradients
from composable_fsdp.optim.local_optimizer import Step, replace_step, update_of

__all__ = ["offload_optimizer", "reload_optimizer"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

HOST = "cpu"
_MEMBERS = frozenset(("params", "param_names"))
_ALIGNMENT = 64
_PIECE = 2 << 20
"""The bytes that are read ahead at once: a large page of x86."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice for ``madvise`` of Linux 5.14, which Python does not name: make pages present, readable or writable."""


def offload_optimizer(
    optimizer: OptimizerT,
    to: str | os.PathLike[str] = HOST,
    *,
    bucket_bytes: int = 64 << 20,
    keep_bytes: int = 0,
    pin_memory: bool = True,
) -> OptimizerT:
    """Make the state of ``optimizer`` rest in host memory or in files, and come to the device for the step only.

    The parameters are cut into buckets by the bytes of their state. In a step, the optimizer's own ``step`` runs for
    one bucket after the other, while the state of the next one is fetched and that of the last one goes back. Results
    are bitwise those without it.

    All else is unchanged: hooks and closures run once for each step; schedulers, gradient scalers, ``state_dict``,
    ``load_state_dict`` and checkpoints see no difference, except that the tensors in ``state`` are in host memory, or
    in files that are mapped into it. Numbers, tensors without dims and tensors of subclasses stay where they are. So
    does all state of parameters in host memory for ``to="cpu"``.

    With a path, each bucket of each rank has a file that has no name, so no other process can open it, and the system
    frees it when the process ends, in whatever way. A checksum of each bucket is compared when it is read.

    Args:
        optimizer: an optimizer whose update of a parameter depends on that parameter, its gradient, its state and its
            group only; also one of :func:`local_optimizer` or :func:`owner_step`, or :class:`Muon`.
        to: ``"cpu"``, or the path of a folder on a local disk, which is created if needed.
        bucket_bytes: the bytes of state of a bucket on a rank. A larger parameter is a bucket of its own; one of
            :class:`Muon` and :func:`owner_step` may have as many bytes as the state of the largest whole matrix, so
            that each rank has one to compute. During a step, twice as many are on the device. The first step, which
            creates the state, takes it for twice the bytes of its parameters.
        keep_bytes: the bytes of state on a rank that always stay on the device, those of the first parameters.
        pin_memory: page-lock host memory that is copied to or from an accelerator, so that copies overlap with steps.

    Returns:
        The same object. Keep it: its ``step`` alone does not keep it alive.

    Raises:
        ArgumentTypeError: ``optimizer`` is no optimizer.
        ConfigurationError: an argument makes no sense, the folder takes no files or copies on write, or the ``step`` of
            the object has been replaced by a scheduler.
        StorageError: in a step, a file cannot be written: the step is complete, and its state stays in host memory. Or,
            also in ``state_dict``, a file is damaged: its state is lost, and a checkpoint must be loaded. With
            :class:`Muon` and :func:`owner_step`, the other ranks then get a ``PeerError`` in the same step.

    Example::

        optimizer = offload_optimizer(torch.optim.AdamW(model.parameters(), fused=True), "/local/nvme")
    """
    _check(optimizer, bucket_bytes, keep_bytes)
    offload = _Offload(None if to == HOST else _folder(to), bucket_bytes, keep_bytes, pin_memory)
    replace_step(optimizer, offload.by_buckets(update_of(optimizer, "offload_optimizer")), offload.raise_failures)
    optimizer.register_state_dict_pre_hook(offload.verify)
    optimizer.register_load_state_dict_pre_hook(offload.hold)
    optimizer.register_load_state_dict_post_hook(offload.take)
    _offloads[optimizer] = offload
    offload.cut(optimizer)
    return optimizer


def reload_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """End the offload of ``optimizer``: its state moves to the devices of its parameters, and stays there.

    Raises:
        ConfigurationError: it is not offloaded.
        StorageError: a file is damaged.
    """
    offload = _offloads.get(optimizer)
    if offload is None:
        raise ConfigurationError(f"this {type(optimizer).__name__} is not offloaded. Call offload_optimizer first.")
    offload.verify(optimizer)
    offload.keep_bytes = inf
    offload.cut(optimizer)
    offload.free_slots()
    return optimizer


_offloads: WeakKeyDictionary[Optimizer, _Offload] = WeakKeyDictionary()


def _check(optimizer: Optimizer, bucket_bytes: int, keep_bytes: int) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"offload_optimizer takes an optimizer, such as torch.optim.AdamW(...), not {optimizer!r}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS steps all parameters together, so its state cannot be offloaded in buckets.")
    if bucket_bytes <= 0 or keep_bytes < 0:
        raise ConfigurationError(
            f"bucket_bytes must be positive and keep_bytes at least 0, not {bucket_bytes} and {keep_bytes}."
        )
    if optimizer in _offloads:
        raise ConfigurationError(f"this {type(optimizer).__name__} is offloaded already. Call offload_optimizer once.")


def _folder(to: str | os.PathLike[str]) -> Path:
    folder = Path(to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            name = _COPY_ON_WRITE.get(_file_system_of(folder))
    except OSError as error:
        raise ConfigurationError(
            f"no file can be made in the folder {str(folder)!r}: {error.strerror}. Name one on a local disk that this "
            "process may write to."
        ) from error
    if name is not None:
        raise ConfigurationError(
            f"the folder {str(folder)!r} is on {name}, which needs new space for each change of a file: on a full "
            "disk, the system would end the process in a step. Name a folder on another one, such as ext4 or XFS."
        )
    return folder


# -- where state rests


class _InMemory:
    """Bytes in host memory. ``flat`` is one dim, uint8."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat


class _InFile:
    """Bytes in a file without a name. ``flat``, one dim, uint8, is its mapping.

    An error of the disk in a mapping would end the process. So ``fetch`` makes all pages present before they are used.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, data: torch.Tensor) -> None:
        self._folder = folder
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as this object
        finalize(self, self._file.close)
        view, done = data.numpy().data, 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], done)
        self.flat = torch.frombuffer(mmap.mmap(self._file.fileno(), len(data)), dtype=torch.uint8)
        if sys.platform == "linux":  # with large pages, a file is read at the bandwidth of the disk, by little CPU time
            _advise(self.flat, mmap.MADV_HUGEPAGE)
        self._sum, self._version = _sum(data), self.flat._version

    def read_ahead(self) -> None:
        """Read all bytes into the page cache, but not into this process's memory. ``fetch`` finds what fails here."""
        if sys.platform == "linux":
            for piece in self.flat.split(_PIECE):
                if not _is_cached(piece):
                    _advise(piece, _POPULATE_READ)
                    _advise(piece, mmap.MADV_DONTNEED)

    def fetch(self, advice: int = _POPULATE_WRITE) -> None:
        """Make all pages present, and writable. Raise ``StorageError`` if they are not those that were written."""
        size = os.fstat(self._file.fileno()).st_size
        if size < len(self.flat):
            raise self._damage(f"it has {size} bytes, not {len(self.flat)}")
        failure = _advise(self.flat, advice)
        if failure:
            self._read()
        if failure not in (0, errno.EINVAL):  # EINVAL: the system has no such advice, so page faults come in the step
            raise self._damage(f"its pages cannot be used: {os.strerror(failure)}")
        found = _sum(self.flat)
        if self._version != self.flat._version:  # somebody has written to ``optimizer.state``
            self._sum, self._version = found, self.flat._version
        elif found != self._sum:
            raise self._damage("its checksum differs from that of what was written")

    def release(self, *, changed: bool = True) -> None:
        """Take the pages out of this process's memory. They stay in the page cache, and go to the disk from there."""
        if changed:
            self._sum, self._version = _sum(self.flat), self.flat._version
        if sys.platform == "linux":
            _advise(self.flat, mmap.MADV_DONTNEED)

    def _read(self) -> None:
        """Read all bytes into the page cache. Raise ``StorageError`` for an error of the disk."""
        piece, done = bytearray(_PIECE), 0
        while done < len(self.flat):
            try:
                count = os.preadv(self._file.fileno(), [piece], done)  # fewer bytes if an error follows them
            except OSError as error:
                raise self._damage(str(error)) from error
            if not count:
                raise self._damage(f"it has {done} bytes, not {len(self.flat)}")
            done += count

    def _damage(self, what: str) -> StorageError:
        return StorageError(
            f"a file of optimizer state in {str(self._folder)!r} is damaged: {what}. The state of some parameters is "
            "lost. Check the disk, and load the newest checkpoint into model and optimizer: "
            "composable_fsdp.checkpoint.load(folder, model, optimizer)."
        )


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _advise(flat: torch.Tensor, advice: int) -> int:
    """Call ``madvise`` for the mapping ``flat``, and return its error number. ``mmap.madvise`` would keep the GIL."""
    if _libc is None:
        return errno.EINVAL
    failed = _libc.madvise(ctypes.c_void_p(flat.data_ptr()), ctypes.c_size_t(len(flat)), advice)
    return ctypes.get_errno() if failed else 0


_COPY_ON_WRITE = {0x9123683E: "btrfs", 0x2FC12FC1: "ZFS", 0xCA451A4E: "bcachefs"}
"""File systems by their number in ``statfs``. A page that is written to disk needs new space to be changed again."""


def _file_system_of(folder: Path) -> int:
    """Return the number of the file system, 0 if it is not known."""
    found = ctypes.create_string_buffer(256)
    if _libc is None or _libc.statfs(os.fsencode(folder), found):
        return 0
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF


def _is_cached(piece: torch.Tensor) -> bool:
    """Return whether the first page of ``piece`` is in the page cache."""
    found = ctypes.c_ubyte()
    failed = _libc is None or _libc.mincore(ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(1), ctypes.byref(found))
    return not failed and bool(found.value & 1)


def _sum(data: torch.Tensor) -> int:
    """Return the sum of the 64-bit words of ``data``, modulo 2**64: a tenth of the time of a CRC-32."""
    return int(data.view(torch.int64).sum())


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
        rest: where the state rests. None for state that stays on the device, or does not exist yet.
        resting: all tensors of the state at rest.
        places: where each of ``resting`` is in ``rest``, None for one that stays where it is.
        nbytes: the bytes of ``rest``.
    """

    def __init__(self, members: Iterable[_Member] = ()) -> None:
        self.members = list(members)
        self.rest: _InMemory | _InFile | None = None
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

    def __init__(self, folder: Path | None, bucket_bytes: int, keep_bytes: float, pin_memory: bool) -> None:
        self.folder, self.bucket_bytes, self.keep_bytes, self.pin_memory = folder, bucket_bytes, keep_bytes, pin_memory
        self._failures: list[OSError] = []
        """The errors of files that could not be written."""
        self._slots: dict[torch.device, list[torch.Tensor]] = {}
        self._kept = 0
        self._resident = _Bucket()
        self._buckets: list[_Bucket] = []
        self._lost = ""
        """The text of the error with which state was lost."""
        self._lost_state: dict[Any, Any] = {}
        """That state, by parameter. Its values must not be read."""

    # -- at rest

    def cut(self, optimizer: Optimizer) -> None:
        """Cut all parameters into buckets, and put their state to rest."""
        groups = enumerate(optimizer.param_groups)
        members = [_Member(p, g, n) for g, group in groups for n, p in enumerate(group["params"])]
        self._kept, self._resident = 0, _Bucket()
        with torch.inference_mode(False), torch.no_grad():
            self._buckets = self._put_to_rest(optimizer, members)

    def _put_to_rest(self, optimizer: Optimizer, members: Sequence[_Member]) -> list[_Bucket]:
        """Cut ``members`` into buckets by the bytes of their state, and put it to rest. Some stay on their device."""
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
            if self.folder is None and is_host(device):
                self._resident.members.append(member)
                continue
            if leaves and self._kept + nbytes <= self.keep_bytes:
                self._kept += nbytes
                self._resident.members.append(member)
                for leaf in filter(_is_movable, leaves):
                    local = local_part(leaf.tensor)
                    leaf.replace(torch.empty_like(local, device=device).copy_(local))
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
            pin = self.pin_memory and self.folder is None and not is_host(bucket.device)
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, pin_memory=pin).zero_()
            for leaf, place in zip(leaves, bucket.places, strict=True):
                if place is not None:
                    place.of(flat).copy_(local_part(leaf.tensor))
            self.put_in(bucket, leaves, self.stored(flat))
        else:
            bucket.resting = [leaf.tensor for leaf in leaves]

    def put_in(self, bucket: _Bucket, leaves: Sequence[_Leaf], rest: _InMemory | _InFile) -> None:
        bucket.rest = rest
        bucket.resting = bucket.put(leaves, rest.flat)

    def host_slots(self, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        """Return memory of the host for two buckets between files and ``device``. It is kept for later steps."""
        slots = self._slots.get(device, [])
        if self.folder is not None and not is_host(device) and (not slots or len(slots[0]) < nbytes):
            slots = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pin_memory) for _ in range(2)]
            self._slots[device] = slots
        return slots

    def free_slots(self) -> None:
        self._slots.clear()

    def note(self, error: OSError) -> None:
        """Note that a file could not be written. The step raises when it is done."""
        self._failures.append(error.with_traceback(None))  # which would keep the file open, and its space in use

    def stored(self, data: torch.Tensor) -> _InMemory | _InFile:
        """Return ``data`` in a new file, or ``data`` itself if none can be written."""
        if self.folder is not None:
            try:
                return _InFile(self.folder, data)
            except OSError as error:
                self.note(error)
        return _InMemory(data)

    def raise_failures(self) -> None:
        """Raise for files that could not be written in the step, which is complete."""
        failures, self._failures = self._failures, []
        if failures:
            raise StorageError(
                f"{len(failures)} file(s) of optimizer state in {str(self.folder)!r} could not be written: "
                f"{failures[0]}. Nothing is lost: the step is complete, and this state stays in host memory. Free some "
                "space, and the next step writes it again; or save a checkpoint, and start again with another folder."
            ) from failures[0]

    # -- in a step

    def by_buckets(self, update: Step) -> Step:
        """Return the step. The closure runs before: it calls ``backward``, and ``zero_grad`` on the optimizer."""

        @wraps(update)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            with torch.inference_mode(False), torch.no_grad():
                self._failures.clear()  # of loading: this step writes again
                self._carry_out(optimizer, _Update(optimizer, lambda: update(optimizer, **options)))
            return loss

        return step

    def _carry_out(self, optimizer: Optimizer, update: _Update) -> None:
        self._follow(optimizer)
        stepped = [bucket for bucket in self._buckets if bucket.is_stepped]
        # Exchanges come last: they tell other ranks of state that was lost before.
        stepped.sort(key=lambda bucket: bool(_exchanged(optimizer, bucket.members)))
        others = [*self._resident.members, *(m for b in self._buckets if not b.is_stepped for m in b.members)]
        try:
            optimizer.state.update(self._lost_state)  # exchanges have the bytes of the state, also if it is not read
            with _telling_others(update, [_Bucket(others), *stepped]):
                self._check_not_lost()
        finally:
            self._drop_lost(optimizer)
        if others or not stepped:
            update(others)
        replaced: dict[int, list[_Bucket]] = {}
        for device, buckets in group_by_key([bucket.device for bucket in stepped], stepped):
            transfers = _Transfers(self, device, buckets)
            try:
                for number, bucket in enumerate(buckets):
                    with self._losing(optimizer, bucket), _telling_others(update, buckets[number:]):
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
                for bucket, rest in transfers.finish():
                    self.put_in(bucket, bucket.leaves(optimizer), rest)
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

    # -- lost state

    def verify(self, optimizer: Optimizer) -> None:
        """Raise ``StorageError`` if some state is lost, or a file is damaged."""
        self._check_not_lost()
        for bucket in self._buckets:
            if isinstance(bucket.rest, _InFile):
                with self._losing(optimizer, bucket):
                    bucket.rest.fetch(_POPULATE_READ)
                bucket.rest.release(changed=False)

    def _check_not_lost(self) -> None:
        if self._lost:
            raise StorageError(self._lost)

    def _drop_lost(self, optimizer: Optimizer) -> None:
        for p in self._lost_state:
            optimizer.state.pop(p, None)

    @contextmanager
    def _losing(self, optimizer: Optimizer, bucket: _Bucket) -> Iterator[None]:
        """Drop the state of ``bucket`` if its file is damaged, so that nobody takes it for state."""
        try:
            yield
        except StorageError as error:
            self._lost = str(error)
            self._lost_state |= {p: optimizer.state[p] for p, *_ in bucket.members if p in optimizer.state}
            self._drop_lost(optimizer)
            bucket.rest, bucket.resting = None, []
            raise

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
        self._lost, self._lost_state = "", {}
        self.cut(optimizer)


def _held(value: Any) -> Any:
    return _Held(value) if isinstance(value, torch.Tensor) and value.ndim else value


def _released(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, _Held):
        return value
    return value.tensor if dtype is None else value.tensor.to(dtype)


@contextmanager
def _telling_others(update: _Update, buckets: Sequence[_Bucket]) -> Iterator[None]:
    """If state is lost, have the ranks raise that step whole matrices of ``buckets`` together with this one."""
    try:
        yield
    except StorageError as lost:
        try:
            for bucket in buckets:
                with without_gradients([member.parameter for member in bucket.members], str(lost)):
                    update(bucket.members)
        except PeerError:
            pass  # the others stop there, too
        except Exception as error:  # of an update that needs gradients
            raise lost from error
        raise


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
    """Brings the state of ``buckets``, all of one device, to it and back, in their order, by a thread.

    An accelerator has two slots, and two beside them in host memory for files. A bucket takes that of the last but one,
    once that one has gone back. On the host, state is stepped where it rests.

    Another thread reads files into the page cache before, so that the disk is always busy.
    """

    def __init__(self, offload: _Offload, device: torch.device, buckets: Sequence[_Bucket]) -> None:
        self._offload, self._buckets = offload, buckets
        nbytes = max(bucket.nbytes for bucket in buckets)
        self._host = offload.host_slots(nbytes, device)
        self._module: Any = None if is_host(device) else device_capabilities(device).module
        self._departed: Any = None
        if self._module is not None:
            self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self._in, self._out = self._module.Stream(), self._module.Stream()
            for stream in (self._in, self._out):
                stream.wait_stream(self._module.current_stream())  # the memory of the slots may be in use until now
        set_device = None if self._module is None else partial(self._module.set_device, device)  # new threads have 0
        self._thread = ThreadPoolExecutor(1, "optimizer-state", set_device)
        self._reader = ThreadPoolExecutor(1, "optimizer-state-reader")
        self._reads = [self._reader.submit(self._read_ahead, number) for number in range(min(3, len(buckets)))]
        self._arrivals = [self._thread.submit(self._fetch, number) for number in range(min(2, len(buckets)))]
        self._returns: list[Future[None]] = []
        self._moved: list[tuple[_Bucket, _InMemory | _InFile]] = []

    def stage(self, number: int, leaves: Sequence[_Leaf]) -> list[torch.Tensor]:
        """Put the state of a bucket on the device, and return its tensors. ``leaves`` are where it rests."""
        arrival, bucket = self._arrivals[number].result(), self._buckets[number]
        if bucket.rest is None:
            return bucket.resting
        if self._module is not None:
            self._module.current_stream().wait_event(arrival)
            return bucket.put(leaves, self._slots[number % 2])
        return bucket.resting

    def send_back(self, number: int, leaves: Sequence[_Leaf] | None) -> None:
        """Bring back the state of a bucket, which is in ``leaves``, unless it rests already. Fetch another one."""
        bucket = self._buckets[number]
        if leaves is not None and bucket.rest is not None:
            stepped = None
            if self._module is not None:
                stepped = self._module.current_stream().record_event()
                bucket.restore(leaves)
            self._returns.append(self._thread.submit(self._return, number, bucket.rest, stepped))
        if number + 3 < len(self._buckets):
            self._reads.append(self._reader.submit(self._read_ahead, number + 3))
        if number + 2 < len(self._buckets):
            self._arrivals.append(self._thread.submit(self._fetch, number + 2))

    def finish(self) -> list[tuple[_Bucket, _InMemory | _InFile]]:
        """Wait for everything. Return the buckets that rest elsewhere now."""
        self._reader.shutdown()
        self._thread.shutdown()
        for bucket in self._buckets:
            if isinstance(bucket.rest, _InFile):  # it was fetched, and an update failed
                bucket.rest.release(changed=False)
        if self._module is not None:
            for stream in (self._in, self._out):
                self._module.current_stream().wait_stream(stream)  # the memory of the slots returns to it
            self._out.synchronize()  # the host may read it next
        for each in self._returns:
            each.result()
        return self._moved

    # -- on the threads

    def _read_ahead(self, number: int) -> None:
        rest = self._buckets[number].rest
        if isinstance(rest, _InFile):
            rest.read_ahead()

    def _fetch(self, number: int) -> Any:
        """Return the event of the arrival on an accelerator."""
        self._reads[number].result()
        bucket, slot = self._buckets[number], number % 2
        if isinstance(bucket.rest, _InFile):
            bucket.rest.fetch()
        if bucket.rest is None or self._module is None:
            return None
        source = bucket.rest.flat
        if self._host:
            source = _copy_on_host(self._host[slot][: bucket.nbytes], source)
        if self._departed is not None:
            self._in.wait_event(self._departed)
        with self._module.stream(self._in):
            self._slots[slot][: bucket.nbytes].copy_(source, non_blocking=True)
        return self._in.record_event()

    def _return(self, number: int, rest: _InMemory | _InFile, stepped: Any) -> None:
        bucket, slot = self._buckets[number], number % 2
        stepped_state = rest.flat
        if self._module is not None:
            if self._host:
                stepped_state = self._host[slot][: bucket.nbytes]
            self._out.wait_event(stepped)
            with self._module.stream(self._out):
                stepped_state.copy_(self._slots[slot][: bucket.nbytes], non_blocking=True)
            self._departed = self._out.record_event()
            if self._host:
                self._departed.synchronize()
        if isinstance(rest, _InFile):
            if self._host:
                _copy_on_host(rest.flat, stepped_state)
            rest.release()
        elif self._offload.folder is not None:  # its file could not be written before
            data = stepped_state.clone() if self._host else stepped_state
            self._moved.append((bucket, self._offload.stored(data)))


def _copy_on_host(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy at once: a copy by torch from or to page-locked memory belongs to a stream."""
    target.numpy()[:] = source.numpy()
    return target
