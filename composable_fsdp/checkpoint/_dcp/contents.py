"""What is in a checkpoint, and under which keys.

========================================  =============================================================
``model.<name>``                          parameters, buffers, extra states of modules
``optimizer.state.<name>.<key>``          state for the parameter of that name
``optimizer.param_groups``                list of dicts, with names in ``params``
``averages.values.<name>``                moving averages; ``averages.steps`` how many updates they are made of
``communication.<name>.residual``         what codecs with error feedback keep; ``.rounds`` beside it
``ranks.<rank>.extra``, ``….random``      what each rank gave as ``extra``; its random number generators
``classes.<key>``                         of a tensor of a class of its own, of which the checkpoint has the inner
                                          tensors under ``<key>.<inner>``: a ``Record`` of ``tensor_classes``
========================================  =============================================================

Names are those of the model before anything wrapped it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp._runtime.params.sharded_param import alias_of
from composable_fsdp._runtime.shard_extent import states_below
from composable_fsdp.checkpoint._dcp.optimizer_state import Agreed, packed, state_of
from composable_fsdp.checkpoint._state_dict import inner_tensors as tensor_classes
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.checkpoint._state_dict.local_state import is_plain
from composable_fsdp.checkpoint._state_dict.names import tensors_of
from composable_fsdp.checkpoint._state_dict.shard_view import Part, checksum
from composable_fsdp.communication_state import CommunicationState

__all__ = ["Contents", "Path", "communication_of", "contents_of", "get_random_state", "set_random_state"]

Path = tuple[str, ...]
"""Where something is in a nested state dict. Joined by dots it is the key in the checkpoint."""


@dataclass
class Contents:
    """What a rank has to save, by key.

    Attributes:
        parts: of tensors. Blocks that several ranks have are written by one of them.
        objects: anything else, serialised by ``torch.save``. Of a key that several ranks have one rank's is written.
        aliases: further keys of what is in ``parts``.
        paths: of all of these.
        alike: checksums of plain tensors in ``parts`` that must be the same on all ranks, though nothing else says so.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    alike: dict[str, int] = field(default_factory=dict)

    def add_tensor(self, path: Path, part: Part) -> None:
        self.parts[self._key(path)] = part

    def add_alias(self, path: Path, of: Path) -> None:
        self.aliases[self._key(path)] = ".".join(of)

    def add_alike(self, path: Path, value: torch.Tensor) -> None:
        """A plain tensor, of which one rank's is saved."""
        self.add_tensor(path, Part(value))
        self.alike[self._key(path)] = checksum(Part(value).local)

    def add_object(self, path: Path, value: object) -> None:
        self.objects[self._key(path)] = packed(value)

    def inner_offers(self) -> dict[str, tensor_classes.Offer]:
        """This rank's parts of tensors that a checkpoint holds as inner tensors.

        Raises:
            CheckpointError: nothing says which ones stand for a tensor.
        """
        for key, part in self.parts.items():
            tensor_classes.refuse_unknown(key, part)
        return {key: tensor_classes.offer_of(p) for key, p in self.parts.items() if tensor_classes.has_inner(p)}

    def expand(self, agreed: Mapping[str, tensor_classes.Agreed]) -> None:
        """Puts inner tensors in the place of those that have any, as all ranks ``agreed``."""
        of = {alias: key for alias, key in self.aliases.items() if key in agreed}
        for key in of:
            del self.aliases[key]
        for key in [key for key in self.parts if key in agreed]:
            part, path = self.parts.pop(key), self.paths.pop(key)
            inner = tensor_classes.parts_of(part, agreed[key].inner)
            self._add_record(key, path, part, agreed[key])
            for suffix, each in inner.items():
                self.add_tensor(_longer(path, suffix), each)
            for alias in (alias for alias, first in of.items() if first == key):
                other = self.paths.pop(alias)
                self._add_record(alias, other, part, agreed[key])
                for suffix in inner:
                    self.add_alias(_longer(other, suffix), _longer(path, suffix))

    def _add_record(self, key: str, path: Path, part: Part, agreed: tensor_classes.Agreed) -> None:
        self.add_object(("classes", key), agreed.record(path, part).encoded())

    def _key(self, path: Path) -> str:
        key = ".".join(path)
        self.paths[key] = path
        return key


def _longer(path: Path, suffix: str) -> Path:
    return (*path[:-1], f"{path[-1]}{suffix}")


def contents_of(
    model: nn.Module,
    optimizer: Optimizer | None,
    averages: ShardedEMA | None,
    extra: Mapping[str, Any],
    rank: int,
    agreed: Agreed,
) -> Contents:
    """All that this rank has to save. Tensors are not copied.

    Args:
        model: sharded or not.
        optimizer: over parameters of ``model``.
        extra: of this rank.
        rank: this one.
        agreed: what all ranks have of the optimizer.

    Raises:
        CheckpointError: the model is on the meta device.
    """
    contents = Contents()
    tensors, others = tensors_of(model)
    for first, *shared in tensors:
        contents.add_tensor(("model", first.name), Part(first.value, first.sharding))
        for entry in shared:
            contents.add_alias(("model", entry.name), ("model", first.name))
    for entry in others:
        contents.add_object(("model", entry.name), entry.value)
    if optimizer is not None:
        _add_optimizer(contents, model, optimizer, agreed)
    if averages is not None:
        for entry in averages.entries():
            contents.add_tensor(("averages", "values", entry.name), Part(entry.value, entry.sharding))
        contents.add_object(("averages", "steps"), averages.steps)
    for name, kept in communication_of(model).items():
        contents.add_tensor(("communication", name, "residual"), Part(kept["residual"]))
        contents.add_object(("communication", name, "rounds"), kept["rounds"])
    contents.add_object(("ranks", str(rank), "extra"), dict(extra))
    contents.add_object(("ranks", str(rank), "random"), get_random_state())
    return contents


def _add_optimizer(contents: Contents, model: nn.Module, optimizer: Optimizer, agreed: Agreed) -> None:
    for member, key, value in state_of(model, optimizer):
        path = ("optimizer", "state", member.name, key)
        if (member.name, key) in agreed.shards:
            contents.add_tensor(path, Part(alias_of(cast(DTensor, member.parameter), value), member.sharding))
        elif is_plain(value, member) and type(Part(value).local) is torch.Tensor:
            contents.add_alike(path, value)
        elif isinstance(value, torch.Tensor):
            contents.add_tensor(path, Part(value, member.sharding))
        else:
            contents.add_object(path, value)
    contents.add_object(("optimizer", "param_groups"), agreed.groups)


def communication_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What codecs keep from step to step: ``residual`` and ``rounds`` by name; nothing in a model without shards."""
    return CommunicationState(model).state_dict() if states_below(model) else {}


def get_random_state() -> dict[str, Any]:
    """Of Python, torch on CPU and on the current accelerator, and numpy where it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    accelerator = _accelerator()
    if accelerator is not None:
        state[accelerator] = torch.get_device_module(accelerator).get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Goes on from what :func:`get_random_state` gave, for what there is here."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    accelerator = _accelerator()
    if accelerator is not None and accelerator in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type
