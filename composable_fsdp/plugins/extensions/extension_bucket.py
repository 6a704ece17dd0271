"""A bucket of parameters whose local tensors have all-gather hooks, or a class to keep.
Invariants: the full tensor of a parameter is one object from its first all-gather on, because autograd saves it; later
all-gathers refill it. Ranks agree once, at the first all-gather, on the sizes of their inputs, so that no rank hangs
because another one sends something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from composable_fsdp._consistency.process_groups import gather_objects
from composable_fsdp._core.gather import AllGatherBuffers
from composable_fsdp._core.group import GatherKind
from composable_fsdp._core.group_plan import BucketPlan, GatherClaim
from composable_fsdp._core.layout import TensorShards
from composable_fsdp._core.mesh import ProcessGroups
from composable_fsdp._core.params import ShardedParameter, is_wrapper, local_part, plain_tensors
from composable_fsdp._core.reduce import BucketReducer
from composable_fsdp.errors import ConfigurationError, ParameterError
from composable_fsdp.plugins.extensions.gather_hooks import (
    RELEASE_HOOK,
    Extension,
    GatherExtension,
    Payload,
    PlainExtension,
    ViewExtension,
    find_extension,
    find_view,
    refill_checked,
)
from composable_fsdp.plugins.extensions.tensor_classes import (
    VIEW_HOOK,
    cut_shard,
    hooks_of,
    keeps_class,
    warn_of_lost_hooks,
)


class Extensions(GatherKind):
    """Gathers parameters whose local tensors have FSDP hooks, or a class to keep, for :class:`ExtendedBucket`."""

    def find(self) -> None:
        self._hooks = {p: hooks_of(p.local) for p in self.group.parameters if _keeps_class(p.local)}
        self._found = {parameter: self._extension(parameter) for parameter in self._hooks}

    def _extension(self, p: ShardedParameter) -> GatherExtension:
        is_alone = p.sharding.axes.shard.size == 1 and self.group.rest_device_of(p) == self.group.device
        may_view = is_alone and p.compute_dtype == p.dtype and not p.sharded.requires_grad
        found = (find_view(p) if may_view and not p.local.is_meta else None) or find_extension(p)
        if found is None and VIEW_HOOK in self._hooks[p] and is_wrapper(p.local) and not (may_view and p.local.is_meta):
            raise ParameterError(
                f"parameter {p.name!r} is a {type(p.local).__name__} with fsdp_get_unsharded_view, which serves frozen "
                "parameters on one rank, in their own dtype and not offloaded, if it does not return None. Let it have "
                "fsdp_pre_all_gather and fsdp_post_all_gather too."
            )
        return found or PlainExtension(p.name, p.local, p.dim, p.compute_dtype)

    def claim(self, parameter: ShardedParameter) -> GatherClaim | None:
        # Hooks decide what is sent. The layout says what would be sent without them.
        return GatherClaim(Extensions, packs=False) if parameter in self._found else None

    def make(self, plan: BucketPlan) -> ExtendedBucket:
        group = self.group
        members = [group.parameters[i] for i in plan.indices]
        found, pgs = [self._found[p] for p in members], group.process_groups[plan.axes]
        return ExtendedBucket(plan, members, found, pgs, group.device, group.on_gradient)

    def has_changed(self) -> bool:
        return any(hooks_of(p.local) != self._hooks.get(p, frozenset()) for p in self.group.parameters)

    def before_replacement(self, parameter: ShardedParameter, local: torch.Tensor) -> None:
        lost = self._hooks.get(parameter, frozenset()) - hooks_of(local)
        if lost:
            how = "replaced after fully_shard (to_empty, to or load_state_dict(assign=True))"
            warn_of_lost_hooks(parameter.name, parameter.local, local, lost, how)

    @staticmethod
    def cut(
        name: str, full: torch.Tensor, shards: TensorShards, rank: int, device: torch.device
    ) -> torch.Tensor | None:
        return cut_shard(name, full, shards, rank, device) if _keeps_class(full) else None

    @staticmethod
    def check_copy(name: str, local: torch.Tensor, copy: torch.Tensor) -> None:
        if hooks_of(local) and not hooks_of(copy):
            raise ConfigurationError(
                f"the local tensor of parameter {name!r} has all-gather hooks hung on it, which know this tensor and "
                "not a copy. Use a tensor class with these methods, or build and load a second model."
            )


def _keeps_class(tensor: torch.Tensor) -> bool:
    """Return False at once for a plain tensor with no attribute of its own, as most are."""
    return (type(tensor) not in (torch.Tensor, torch.nn.Parameter) or bool(vars(tensor))) and keeps_class(tensor)


Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one input."""


def _specs(inputs: Sequence[torch.Tensor]) -> tuple[Spec, ...]:
    return tuple((tuple(t.shape), t.dtype) for t in inputs)


@dataclass
class _Gathered:
    """The state of one parameter's all-gathers."""

    extension: GatherExtension
    releases_outputs: bool
    """True if ``outputs`` are freed once the full tensor exists."""
    specs: list[tuple[Spec, ...]] = field(default_factory=list)
    """Specs of the inputs, for each rank of the shard axis. Empty before the first all-gather."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    """The gathered outputs, one per input: all ranks' inputs concatenated on dim 0."""
    inner: tuple[torch.Tensor, ...] = ()
    """The tensors that the full tensor is made of."""
    metadata: object = None
    storages: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """A tensor of each storage that is freed between uses, with the storage's size in bytes."""
    is_refilled: bool = False
    """True once the second hook was seen to refill the full tensor."""


class ExtendedBucket:
    """The parameters of one group that have hooks and the same axes and dtypes."""

    needs_barrier = False
    creates_parameters = True

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        extensions: Sequence[GatherExtension],
        pgs: ProcessGroups,
        device: torch.device,
        on_gradient: Callable[[torch.Tensor], None],
    ) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        self.pgs = pgs
        self._device = device
        self._on_gradient = on_gradient
        self._gathered = [_Gathered(each, isinstance(each, Extension) and each.releases_outputs) for each in extensions]
        rest = self.parameters[0].local.device
        self.reducer = BucketReducer(plan, self.parameters, pgs, device, rest, pin_memory=False)

    @property
    def versioned(self) -> list[torch.Tensor]:
        return [parameter.local for parameter in self.parameters]

    @property
    def unsharded_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for g in self._gathered for tensor, _ in g.storages)

    @property
    def cached_part(self) -> None:
        return None

    def sent_bytes(self) -> tuple[list[tuple[int, int]], int]:
        largest = [
            (max(prod(specs[j][0]) for specs in gathered.specs) * dtype.itemsize, dtype.itemsize)
            for gathered in self._gathered
            for j, (_, dtype) in enumerate(gathered.specs[0] if gathered.specs else ())
        ]
        return largest, 0

    def update_plan(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.reducer.update_plan(plan)

    def free(self) -> None:
        for gathered in self._gathered:
            _free([tensor for tensor, _ in gathered.storages])

    # -- shards to full parameters

    def allocate_gather(self) -> None:
        """Return ``None``: hooks allocate their inputs."""

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        """Return the inputs of the all-gather: the results of the first hooks."""
        payloads = [gathered.extension.pre_all_gather() for gathered in self._gathered]
        if any(not gathered.specs for gathered in self._gathered):
            self._agree(payloads)
        sent = []
        for gathered, payload in zip(self._gathered, payloads, strict=True):
            inputs, gathered.metadata = payload
            self._check_unchanged(gathered, inputs)
            for j, tensor in enumerate(inputs):
                largest = max(prod(specs[j][0]) for specs in gathered.specs)
                sent.append(_padded(tensor.detach().view(-1).to(self._device), largest))
        return AllGatherBuffers([], sent)

    def _agree(self, payloads: Sequence[Payload]) -> None:
        """Learn what every rank sends, and raise on all ranks if the inputs do not fit together."""
        own = [_specs(inputs) for inputs, _ in payloads]
        of_ranks = gather_objects(own, self.pgs.axes.shard)
        for gathered, *specs in zip(self._gathered, *of_ranks, strict=True):
            gathered.specs = specs
            alike = {tuple((shape[1:], dtype) for shape, dtype in of_rank) for of_rank in specs}
            if len(alike) > 1:
                raise ParameterError(
                    f"fsdp_pre_all_gather of parameter {gathered.extension.name!r} returned inputs on some ranks that "
                    f"do not fit those of others: {specs} (shape and dtype of each, by shard rank). They may "
                    "differ in dim 0 only."
                )

    def _check_unchanged(self, gathered: _Gathered, inputs: Sequence[torch.Tensor]) -> None:
        known, now = gathered.specs[self.pgs.axes.shard.rank], _specs(inputs)
        if now != known:
            raise ParameterError(
                f"fsdp_pre_all_gather of parameter {gathered.extension.name!r} returned inputs of {now}, after {known} "
                "at its first gather: shapes and dtypes must not change."
            )

    def finish_gather(self, gather: AllGatherBuffers) -> None:
        """Concatenate the ranks' inputs and call the second hooks."""
        rows = iter(gather.rows)
        with torch.inference_mode(False), torch.no_grad():
            for parameter, gathered in zip(self.parameters, self._gathered, strict=True):
                of_parameter = [next(rows) for _ in gathered.specs[0]]
                if gathered.storages:
                    self._refill(parameter, gathered, of_parameter)
                elif not isinstance(gathered.extension, ViewExtension) or parameter.full is not gathered.extension.view:
                    self._collect(gathered, of_parameter)
                    self._fill(parameter, gathered)

    def _fill(self, parameter: ShardedParameter, gathered: _Gathered) -> None:
        """Make the full tensor, on the first all-gather."""
        full, inner = gathered.extension.post_all_gather(gathered.outputs, gathered.metadata, self.plan.compute_dtype)
        if gathered.releases_outputs and _addresses([*inner, *plain_tensors(full)]) & _addresses(gathered.outputs):
            raise ParameterError(
                f"parameter {gathered.extension.name!r} is made of its gathered outputs, which {RELEASE_HOOK} says to "
                "free. Return tensors with memory of their own from fsdp_post_all_gather, or False from that method."
            )
        gathered.inner = inner
        gathered.storages = _storages([*gathered.outputs, *inner])
        if gathered.releases_outputs:
            _free(gathered.outputs)
        parameter.build_unsharded(full, self._on_gradient)

    def _refill(self, parameter: ShardedParameter, gathered: _Gathered, rows: Sequence[torch.Tensor]) -> None:
        """Fill the same full tensor again, hidden from autograd, which has saved it."""
        for tensor, nbytes in gathered.storages:
            if tensor.untyped_storage().nbytes() != nbytes:  # resize_ would copy even to the same size
                tensor.untyped_storage().resize_(nbytes)
        out = local_part(parameter.unsharded)
        written = (*gathered.outputs, *gathered.inner, parameter.unsharded, out)
        with torch.autograd._unsafe_preserve_version_counter(written):
            self._collect(gathered, rows)
            dtype = self.plan.compute_dtype
            if gathered.is_refilled:
                gathered.extension.refill(gathered.outputs, gathered.metadata, dtype, out)
            else:
                freed = _addresses(gathered.inner) - _addresses(gathered.outputs)
                refill_checked(gathered.extension, gathered.outputs, gathered.metadata, dtype, out, freed)
                gathered.is_refilled = True
        if gathered.releases_outputs:
            _free(gathered.outputs)

    def _collect(self, gathered: _Gathered, rows: Sequence[torch.Tensor]) -> None:
        """Concatenate each input of all ranks on dim 0, without the padding that made them equally long."""
        for j, row in enumerate(rows):
            shapes = [specs[j][0] for specs in gathered.specs]
            length = sum(shape[0] if shape else 1 for shape in shapes)
            if len(gathered.outputs) <= j:
                gathered.outputs.append(torch.empty((length, *shapes[0][1:]), dtype=row.dtype, device=self._device))
            output = gathered.outputs[j].view(-1)
            numels = [prod(shape) for shape in shapes]
            if len(set(numels)) == 1:
                output.view(row.shape).copy_(row)
            else:
                torch.cat([row[rank, :numel] for rank, numel in enumerate(numels)], out=output)


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    return flat if flat.numel() == numel else torch.cat([flat, flat.new_zeros(numel - flat.numel())])


def _free(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _addresses(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the addresses of the storage objects of ``tensors``."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _storages(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return one tensor of each storage, with the storage's size in bytes."""
    found = {t.untyped_storage()._cdata: (t, t.untyped_storage().nbytes()) for t in tensors}
    return list(found.values())
