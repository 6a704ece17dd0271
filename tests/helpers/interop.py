"""State that this library and torch's functions exchange, by files and in memory, compared bit by bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import (
    Full,
    load,
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    save,
    state_dict,
)
from composable_fsdp.optim import owner_step

MESHES = {"1 rank": 1, "2 ranks": 2, "4 ranks": 4, "hybrid 2 x 2": 4, "tensor parallel 2 x 2": 4}
"""The number of ranks of each mesh."""

NESTED, FLATTENED = "nested", "flattened"
"""Without and with ``flatten_optimizer_state_dict`` of torch's options."""

OURS, FSDP2, UNSHARDED = "ours", "FSDP2", "unsharded"

Trained = tuple[nn.Module, torch.optim.Optimizer]
Groups = list[dict[str, Any]]


def _soap(groups: Groups) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(groups, precondition_frequency=100)  # rounding of a decomposition depends on memory: see the page


def _shampoo(groups: Groups) -> torch.optim.Optimizer:
    from pytorch_optimizer import Shampoo

    return Shampoo(groups, momentum=0.9)


def _adamw_8bit(groups: Groups) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(groups)


OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, tensor lr": lambda groups: torch.optim.AdamW(_with_tensors(groups), foreach=False),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, amsgrad=True, foreach=True),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "SOAP": _soap,
    "Shampoo": _shampoo,
    "AdamW8bit": _adamw_8bit,
}
WHOLE = ("Adafactor", "SOAP", "Shampoo")
"""Optimizers of whole parameters, which sharded models step by ``owner_step``."""


def _with_tensors(groups: Groups) -> Groups:
    return [{**group, "lr": torch.tensor(group["lr"])} for group in groups]


class Net(nn.Module):
    """A layer that tensor parallelism cuts by rows, one by columns, one not; a buffer; a frozen parameter."""

    seen: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, 2))
        self.layers[2].bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layers(x)


def _width(name: str, *, is_cut: bool) -> int:
    """Return the width of the model: uneven over ranks where it may be, and that of 8-bit state on four ranks."""
    return 128 if name == "AdamW8bit" else 8 if is_cut else 6


class World:
    """The mesh of a name of :data:`MESHES`, and the models and optimizers on it."""

    def __init__(self, mesh: str) -> None:
        self._sources: dict[tuple[str, str], Trained] = {}
        self.is_cut = mesh.startswith("tensor")
        two = mesh.endswith("2 x 2")
        both = init_device_mesh(
            "cpu", (2, 2) if two else (dist.get_world_size(),), mesh_dim_names=("a", "b")[: 1 + two]
        )
        self.data: DeviceMesh = both["a"] if self.is_cut else both
        self.tensor: DeviceMesh | None = both["b"] if self.is_cut else None

    def built(self, side: str, name: str, *, lr: float, seed: int, alone: bool = False) -> Trained:
        """Return a model and its optimizer. ``alone`` ones step without ``owner_step``."""
        torch.manual_seed(seed)
        model = Net(_width(name, is_cut=self.is_cut))
        if side != UNSHARDED:
            if self.tensor is not None:
                parallelize_module(model, self.tensor, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
            shard: Any = fully_shard if side == OURS else torch_fully_shard
            for module in (*model.layers, model):
                shard(module, mesh=self.data)
        first, second, third = model.layers
        groups = [
            {"params": [*first.parameters(), *second.parameters()], "lr": lr, "weight_decay": 0.01},
            {"params": [third.weight], "lr": 2 * lr, "weight_decay": 0.0},
        ]
        optimizer = OPTIMIZERS[name](groups)
        return model, owner_step(optimizer) if name in WHOLE and side != UNSHARDED and not alone else optimizer

    def trained(self, side: str, name: str, *, alone: bool = False) -> Trained:
        model, optimizer = self.built(side, name, lr=0.003, seed=0, alone=alone)
        for step in range(3):
            self.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def source(self, side: str, name: str) -> Trained:
        if (side, name) not in self._sources:
            self._sources[side, name] = self.trained(side, name)
        return self._sources[side, name]

    def backward(self, model: nn.Module, step: int) -> None:
        ranks = self.data.get_local_rank() if self.is_cut else dist.get_rank()
        is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        generator = torch.Generator().manual_seed(10 * step + (ranks if is_sharded else 0))
        with warnings.catch_warnings():  # torch's FSDP2 warns that outputs of tensor-parallel layers are views
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            model(
                torch.randn(4, model.get_parameter("layers.0.weight").size(1), generator=generator)
            ).square().mean().backward()


def full(value: Any) -> Any:
    """Return a copy of the full values, of 8-bit state its values: it can be gathered along dim 0 only."""
    if isinstance(value, DTensor):
        return _with_local(value, plain(value.to_local())).full_tensor().detach().clone()
    return plain(value).detach().clone()


def _with_local(value: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride(), run_check=False
    )


def plain(tensor: Any) -> Any:
    return tensor.dequantize() if hasattr(tensor, "codes") else tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in memory of its own. Torchao's 8-bit state has no ``clone``."""
    if isinstance(tensor, DTensor):
        return _with_local(tensor, copied(tensor.to_local()))
    if not hasattr(tensor, "codes"):
        return tensor.detach().clone()
    quantized: Any = tensor
    names, context = quantized.__tensor_flatten__()
    inner = {name: getattr(quantized, name).clone() for name in names}
    return type(quantized).__tensor_unflatten__(inner, context, quantized.shape, quantized.stride())


def everything(trained: Trained) -> dict[str, Any]:
    """Return the full values of parameters, buffers and state, and the settings of groups."""
    model, optimizer = trained
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[p]: {k: v for k, v in kept.items() if v is not None} for p, kept in optimizer.state.items()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {"model": tensors, "state": {name: kept for name, kept in state.items() if kept}, "groups": groups}
    return pytree.tree_map_only(torch.Tensor, full, found)


def differences(found: Any, wanted: Any, path: str = "") -> Iterator[str]:
    """Say where values differ, and how."""
    kinds = [tuple if isinstance(each, (list, tuple)) else type(each) for each in (found, wanted)]
    if type(found) is not type(wanted):
        yield f"{path} is of type {type(found).__name__}, not {type(wanted).__name__}"
    if kinds[0] is not kinds[1]:
        return
    if isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            yield f"{path} has {sorted(found)}, not {sorted(wanted)}"
        for key in found.keys() & wanted.keys():
            yield from differences(found[key], wanted[key], f"{path}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            yield f"{path} has {len(found)} elements, not {len(wanted)}"
        for index, (own, other) in enumerate(zip(found, wanted, strict=False)):
            yield from differences(own, other, f"{path}[{index}]")
    elif isinstance(wanted, torch.Tensor):
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            yield f"{path} is {tuple(found.shape)} {found.dtype}, not {tuple(wanted.shape)} {wanted.dtype}"
        elif not torch.equal(found, wanted):
            relative = (found - wanted).abs().max() / wanted.abs().max()
            yield f"{path} differs by {float(relative):.1e} of the largest element"
    elif found != wanted:
        yield f"{path} is {found!r}, not {wanted!r}"


@dataclass(frozen=True)
class Way:
    """How state gets from a ``source`` to a ``target``. ``by`` is "save" (ours, read by ``dcp.load`` and
    ``set_state_dict``), "load" (ours, of what ``get_state_dict`` and ``dcp.save`` wrote), "own" (``save`` and
    ``load``), "dcp" (torch's functions only), "dict" (``get_state_dict`` and ``set_state_dict``) or "full" (these of
    the unsharded model, and our full state dicts)."""

    by: str
    source: str
    target: str

    def carry(self, source: Trained, target: Trained, form: str, folder: Path) -> None:
        options = StateDictOptions(
            flatten_optimizer_state_dict=form == FLATTENED,
            full_state_dict=self.by == "dict" and UNSHARDED in (self.source, self.target),
        )
        if self.by == "full":
            state: Any = (
                _get(source, options)
                if self.source == UNSHARDED
                else {"model": state_dict(source[0], Full()), "optimizer": optimizer_state_dict(*source, Full())}
            )
            state = pytree.tree_map_only(torch.Tensor, copied, state)
            if self.target == UNSHARDED:
                _set(target, state, options)
            else:
                load_state_dict(target[0], state["model"])
                load_optimizer_state_dict(*target, state["optimizer"])
            return
        if self.by == "dict":
            _set(target, pytree.tree_map_only(torch.Tensor, copied, _get(source, options)), options)
            return
        if self.by in ("save", "own"):
            path = save(folder, *source).path
        else:
            dcp.save(_get(source, options), checkpoint_id=folder)
            path = folder
        if self.by in ("load", "own"):
            load(path, *target)
            return
        state = _get(target, options)
        dcp.load(state, checkpoint_id=path)
        _set(target, state, options)

    @property
    def control(self) -> Way:
        """The same with torch's FSDP2 in the place of this library."""
        sides = (FSDP2 if side == OURS else side for side in (self.source, self.target))
        return Way("dict" if self.by == "dict" else "dcp", *sides)


def _get(trained: Trained, options: StateDictOptions) -> dict[str, Any]:
    model, optim = get_state_dict(*trained, options=options)
    return {"model": model, "optimizer": optim}


def _set(trained: Trained, state: Mapping[str, Any], options: StateDictOptions) -> None:
    set_state_dict(*trained, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)


@dataclass(frozen=True)
class Column:
    """Ways that a column of the table is about, in one form. Ours alone have none, and go by "nested"."""

    title: str
    ways: tuple[Way, ...]
    form: str = NESTED


def _in_both_forms(title: str, *ways: Way) -> list[Column]:
    return [Column(f"{title}, {form}", ways, form) for form in (NESTED, FLATTENED)]


COLUMNS = [
    *_in_both_forms("A", *(Way("save", OURS, target) for target in (FSDP2, OURS, UNSHARDED))),
    *_in_both_forms("B", *(Way("load", source, OURS) for source in (FSDP2, OURS, UNSHARDED))),
    *_in_both_forms("C", *(Way("dict", *sides) for sides in ((OURS, FSDP2), (FSDP2, OURS), (OURS, OURS)))),
    *_in_both_forms("D", Way("dict", OURS, UNSHARDED), Way("dict", UNSHARDED, OURS)),
    Column("E", (Way("own", OURS, FSDP2), Way("own", OURS, UNSHARDED))),
    Column("F", (Way("full", OURS, UNSHARDED), Way("full", UNSHARDED, OURS))),
]


def outcome(world: World, name: str, way: Way, form: str, folder: Path) -> list[str]:
    """Return what is not the same in source and target after the exchange, or after one more step of both. Both take
    that step with the gradients of the source: transports add those of four ranks in different orders."""
    source, target = world.source(way.source, name), world.built(way.target, name, lr=9.0, seed=1)
    before = everything(source)
    texts: list[str] = []
    try:
        way.carry(source, target, form, folder)
        texts += differences(everything(target), before)
        texts += (f"the source: {text}" for text in differences(everything(source), before))
        for each in (source, target):
            world.backward(each[0], 3)
        _give_gradients(source[0], target[0])
        for _, optimizer in (source, target):
            optimizer.step()
            optimizer.zero_grad()
    except (Exception, dcp.CheckpointException) as error:  # of any code
        texts.append(error_text(error))
    else:
        later = differences(everything(target), everything(source))
        texts += [f"one step later: {text}" for text in later if text not in texts]
    return [f"{name}: {text}" for text in texts]


def error_text(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip()}"


def _give_gradients(source: nn.Module, target: nn.Module) -> None:
    for own, other in zip(source.parameters(), target.parameters(), strict=True):
        if own.grad is None:
            continue
        found = full(own.grad)
        if isinstance(other, DTensor):
            everywhere = DTensor.from_local(found, other.device_mesh, [Replicate()] * other.device_mesh.ndim)
            found = everywhere.redistribute(placements=other.placements)
        other.grad = found


@dataclass(frozen=True)
class Note:
    """A difference that torch's functions alone have too: a pattern of its text, and what it is."""

    pattern: str
    text: str
    depends_on_values: bool = False


NOTES = [
    Note(
        r"Flattening optimizer state_dict only supports",
        "torch's flattened form takes no lists: `get_state_dict` raises `NotImplementedError`.",
    ),
    Note(
        r"KeyError: 'param_groups\.0\.params\.0'",
        "`full_state_dict` and `flatten_optimizer_state_dict` together: `set_state_dict` raises `KeyError`.",
    ),
    Note(
        r"Expected device to be set",
        "`set_state_dict` with `full_state_dict` of an optimizer without state raises `AssertionError`.",
    ),
    Note(
        r"^[^:]+: \['groups'\]\[\d\]\['(betas|eps)'\] is of type list, not tuple$",
        "`set_state_dict` with `full_state_dict` makes lists of settings that are tuples, such as `betas`.",
    ),
    Note(
        r"^SOAP: \['state'\]\['layers\.0\.bias'\] has .*, not \['GG', 'Q'|^SOAP: .*KeyError: 'Q'",
        "`set_state_dict` with `full_state_dict` drops lists without tensors, which SOAP has for biases: its next step "
        "raises `KeyError`.",
    ),
    Note(
        r"^AdamW, fused: one step later: .* differs by [0-9.]+e-(0[789]|1\d) of the largest element$",
        "The state is the same. In the next step, the fused kernel rounds the last elements of each tensor otherwise, "
        "and a shard ends elsewhere than the tensor: less than 1e-6 of the largest element.",
        depends_on_values=True,
    ),
    Note(
        r"^AdamW8bit: .* differs by ([0-9.]+e-(0[3-9]|1\d)|1\.\de-02) of the largest element$",
        "A shard or a slice ends inside of a block of 8-bit state, or the state dict has its values in fp32: they are "
        "quantized again, with a warning. They change by less than 2 % of the largest element.",
        depends_on_values=True,
    ),
    Note(
        r"^AdamW8bit: NotImplementedError: .*'(aten\.split|c10d\.broadcast_)'",
        "8-bit state has no `split` and no `broadcast`: `full_state_dict` raises `NotImplementedError`.",
    ),
    Note(
        r"^AdamW8bit: ValueError: Only support aten\.slice along the first dim",
        "8-bit state has no slices of columns: `dcp.load` of a weight cut by columns raises `ValueError`.",
    ),
]


def notes_of(texts: Iterable[str]) -> list[Note]:
    """Return the notes that explain ``texts``.

    Raises:
        ValueError: one is not known.
    """
    found: dict[Note, None] = {}
    for text in texts:
        note = next((note for note in NOTES if re.search(note.pattern, text)), None)
        if note is None:
            raise ValueError(text)
        found[note] = None
    return list(found)


Cell = tuple[str, Way, str]
"""An optimizer, a way and a form."""


def outcomes(mesh: str, cells: Sequence[Cell], folder: Path) -> list[list[Note]]:
    """Return the notes of each cell.

    Raises:
        AssertionError: a difference is not known, or torch's functions alone do not have it.
    """
    world, found = World(mesh), []
    for index, (name, way, form) in enumerate(cells):
        at = folder / f"{mesh} {index}"
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for a minute
            texts = _of_all_ranks(outcome(world, name, way, form, at))
        try:
            notes = notes_of(texts)
            if notes:
                with torch.compiler.set_stance("force_eager"):
                    alone = _of_all_ranks(outcome(world, name, way.control, form, at.with_suffix(".alone")))
                wrong = [note for note in notes if note not in notes_of(alone) and not note.depends_on_values]
                if wrong:
                    raise ValueError(f"{wrong}, but torch alone: {alone}")
        except ValueError as error:
            raise AssertionError(f"{mesh}, {name}, {way}, {form}: {error}") from None
        found.append(notes)
    return found


def _of_all_ranks(texts: list[str]) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, texts)
    return sorted({text for each in found for text in each})


def error_of_fsdp2(mesh: str, name: str) -> str:
    """Return the error of torch's FSDP2 with an optimizer of whole parameters without ``owner_step``."""
    try:
        World(mesh).trained(FSDP2, name, alone=True)
    except Exception as error:  # of any code
        return error_text(error)
    return ""
