"""A communicator whose all-gather or reduce-scatter is a callable of the user.

The callables have the interface of ``torch.distributed.fsdp``'s ``AllGather`` and ``ReduceScatter``: ``allocate(size,
*, dtype, device)`` returns a message buffer, and the call launches the collective and returns a work, or ``None`` if it
is already done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from composable_fsdp._comm.c10d import OPERATIONS, WorkList
from composable_fsdp._comm.communicator import Communicator, GroupCommunicator, Transfer, Work
from composable_fsdp._layout.bucket_layout import NEVER_ZERO_COPY
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp.errors import ArgumentTypeError

__all__ = ["CustomCollective", "CustomCommunicator", "customize"]


class CustomCollective(Protocol):
    """The argument type of ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a 1-d message buffer of ``size`` elements."""
        ...

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, *args: Any, **kw: Any
    ) -> Work | None:
        """Launch. An all-gather gets the keyword ``async_op``, a reduce-scatter ``op``, a ``dist.ReduceOp``."""
        ...


@dataclass(frozen=True, slots=True)
class CustomCommunicator:
    """``base`` with one direction replaced by ``collective``. Final.

    All parameters of a group and dtype share one message, so that ``allocate`` is called for all of them.

    Args:
        base: the communicator of the other direction.
        collective: the user's collective.
        all_gather_options: returns additional keywords for an all-gather.
    """

    base: GroupCommunicator
    collective: CustomCollective
    all_gather_options: Callable[[], Mapping[str, Any]] = dict
    coalesces: bool = False
    zero_copy_min_bytes: int = NEVER_ZERO_COPY
    grad_bucket_bytes: int = NEVER_ZERO_COPY
    aliases: bool = False
    widens: bool = False

    @property
    def rank(self) -> int:
        return self.base.rank

    @property
    def size(self) -> int:
        return self.base.size

    @property
    def averages(self) -> bool:
        return self.base.averages

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.collective.allocate((numel,), dtype=dtype, device=device)

    def all_gather(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        return self._launch(transfers, self.all_gather_options())

    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "") -> Work:
        return self._launch(transfers, {"op": OPERATIONS[op]})

    def all_to_all(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        return self.base.all_to_all(transfers, label)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "") -> Work:
        return self.base.all_reduce(tensors, op, label)

    def _launch(self, transfers: Sequence[Transfer], options: Mapping[str, Any]) -> Work:
        call, group = self.collective, self.base.group
        works = [call(output_tensor=t.output, input_tensor=t.input, group=group, **options) for t in transfers]
        return WorkList(tuple(work for work in works if work is not None))


def customize(
    base: Communicator,
    collective: object,
    setter: str,
    all_gather_options: Callable[[], Mapping[str, Any]] = dict,
) -> Communicator:
    """Return ``base`` with one direction replaced by ``collective``, or ``base`` itself if its axis has one rank.

    Raises:
        ArgumentTypeError: ``collective`` lacks ``allocate`` or cannot be called.
    """
    allocate: Callable[..., Any] | None = getattr(collective, "allocate", None)
    if not callable(collective) or not callable(allocate):
        raise ArgumentTypeError(
            f"{setter} takes an object with allocate(size, *, dtype, device) that can be called with (output_tensor, "
            f"input_tensor, group, ...), not {type(collective).__name__}."
        )
    if not isinstance(base, GroupCommunicator):
        return base
    return CustomCommunicator(base, collective, all_gather_options)  # type: ignore[arg-type]
