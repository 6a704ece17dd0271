"""The forms of a state dict: full, sharded and local."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composable_fsdp.errors import ArgumentTypeError, ConfigurationError

__all__ = ["Form", "Full", "Local", "Sharded", "check_form"]


class _Options:
    """Base that rejects unknown options, and names the form that has them."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        known = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        for option in options:
            owners = [form.__name__ for form in (Full, Sharded, Local) if option in form.__dataclass_fields__]
            if option not in known:
                whose = f"an option of {' and '.join(owners)}" if owners else "no option of any form"
                raise ConfigurationError(f"{option} is {whose}, not of {cls.__name__}, which has {sorted(known)}.")
        return super().__new__(cls)


@dataclass(frozen=True)
class Full(_Options):
    """Full plain tensors, with the names and shapes of the unsharded model.

    Args:
        rank0_only: only rank 0 gets values, or provides them when loading. Other ranks get, and pass, an empty dict.
        offload_to_cpu: return tensors in CPU memory. The accelerator then holds one full tensor at a time.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Sharded(_Options):
    """``DTensor``s of which each rank has its shard, as ``torch.distributed.checkpoint`` takes them.

    Args:
        offload_to_cpu: return local tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Local(_Options):
    """This rank's shards as plain tensors, empty ones included. They can be loaded with the same sharding only.

    Args:
        offload_to_cpu: return tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


Form = Full | Sharded | Local


def check_form(form: object) -> None:
    """Raise ``ArgumentTypeError`` if ``form`` is none, such as its name or its class."""
    if not isinstance(form, _Options):
        raise ArgumentTypeError(f"the form of a state dict is Full(), Sharded() or Local(), not {form!r}.")
