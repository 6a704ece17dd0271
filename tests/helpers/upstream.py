"""The public names of the installed torch's FSDP2 beside ours: ``python -m tests.helpers.upstream`` writes the page.
Names, parameters, their kinds and their defaults are compared. Annotations are not: they change no program. Every
difference needs a reason in ``REASONS``, and every reason needs a difference in a supported version of torch."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import _fully_shard

import composable_fsdp

REASONS = {
    "fully_shard(policy)": "Ours shards the modules that a policy chooses in one call.",
    "fully_shard(strategy)": "Ours takes the names of sharding strategies.",
    "fully_shard(ignored_modules)": "Ours leaves out all parameters of modules.",
    "fully_shard(dp_mesh_dims)": "Ours has the parameter of torch 2.13.",
    "fully_shard(device)": "Ours moves parameters to a device that is not the default one of the mesh.",
    "fully_shard(shared_from)": "Ours lets groups share tied weights.",
    "fully_shard(comm_policy)": "Ours encodes communication without tensor subclasses.",
    "fully_shard(sync_module_states)": "Ours can begin with the values of rank 0.",
    "fully_shard(param_init_fn)": "Ours initializes modules on the meta device.",
    "fully_shard(**unknown)": "Ours names the right argument in the error for one that does not exist.",
    "MixedPrecisionPolicy(grad_dtype)": "Ours has the field of torch's open pull request 197368.",
    "fully_shard(mp_policy)": "The default of ours has that field, with the value that changes nothing.",
    "MixedPrecisionPolicy(param_dtype_override_fn)": "Ours has the field of torch 2.15.",
    "FSDPModule.set_keep_unsharded_storage": "Ours keeps parameters by set_reshard_after_forward and _backward.",
    "GradientReductionHandle(root)": "As UnshardHandle.",
    "UnshardHandle(state)": "Neither is constructed by users: torch's public class is a base without a constructor.",
}
"""The reason for each difference from a supported torch: ``name`` if one side lacks it, ``name(parameter)``."""

_MORE_CALLS = {
    "`Shard(d)` with `d > 0` of a size that the ranks do not divide": ("an error", "trains", "`uneven_columns`"),
    "`copy.deepcopy` of a sharded module": ("an error", "a copy that trains independently", "`deep_copy`"),
    "a 2-d mesh without names": ("an error", "replicates over the first dim", "none"),
    "`reset_iter_state()` before a forward": ("an error", "no effect", "`reset_before_the_first_forward`"),
}
"""The results in torch and of ours of calls that torch refuses, and the case in the comparison with FSDP2."""

_MORE = frozenset(composable_fsdp.__all__) - frozenset(_fully_shard.__all__)
"""Public names that torch's FSDP2 lacks. The reference of the API has them."""


@dataclass(frozen=True)
class Comparison:
    """One public name on both sides. ``name``: the function, class, method or field. ``torch``: its signature or
    default in torch; ``""`` if torch lacks it. ``ours``: the same of ours. ``differences``: keys for ``REASONS``."""

    name: str
    torch: str
    ours: str
    differences: tuple[str, ...]


def comparisons() -> Iterator[Comparison]:
    """Yield the comparison of each public name of torch's FSDP2, and of the members that only ours has."""
    for name in sorted(_fully_shard.__all__):
        theirs, ours = getattr(torch_fsdp, name), getattr(composable_fsdp, name, None)
        yield _compare(name, theirs, ours)
        if not inspect.isclass(theirs):
            continue
        members = {member for member in (*vars(theirs), *_fields(theirs)) if not member.startswith("_")}
        for member in sorted(members):
            if member in _fields(theirs):
                continue  # it is a parameter of the class
            of_torch, own = getattr(theirs, member), getattr(ours, member, None)
            is_inherited = own is of_torch and ours is not theirs  # it does not know our states
            is_inherited |= isinstance(own, property) and own.fget is None  # refused
            yield _compare(f"{name}.{member}", of_torch, None if is_inherited else own)


def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _compare(name: str, theirs: Any, ours: Any) -> Comparison:
    if ours is None:
        return Comparison(name, _shown(theirs), "", (name,))
    if not callable(theirs):
        return Comparison(name, _shown(theirs), _shown(ours), () if type(theirs) is type(ours) else (name,))
    known, own = _parameters(theirs), _parameters(ours)
    differing = [each for each in {**known, **own} if known.get(each) != own.get(each)]
    if [each for each in known if each in own] != [each for each in own if each in known]:
        differing.append("order")
    return Comparison(name, _shown(theirs), _shown(ours), tuple(f"{name}({each})" for each in differing))


def _parameters(function: Any) -> dict[str, tuple[str, str]]:
    """Return kind and default of each parameter, by its name with stars."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
        found[stars + parameter.name] = parameter.kind.description, repr(parameter.default)
    return found


def _shown(value: Any) -> str:
    if not callable(value):
        return type(value).__name__
    signature = inspect.signature(value)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def version() -> str:
    """Return the minor version of the installed torch, such as ``"2.13"``."""
    return ".".join(torch.__version__.split(".")[:2])


def page() -> Path:
    return Path(__file__).parents[2] / "docs" / "generated" / f"upstream-{version()}.md"


def render() -> str:
    """Return the text of the page for the installed torch."""
    rows = list(comparisons())
    names = {row.name for row in rows}
    only_ours = sorted(
        f"`{name}`" for name in vars(composable_fsdp.FSDPModule) if name[0] != "_" and f"FSDPModule.{name}" not in names
    )
    lines = [
        f"# Public names of FSDP2 in torch {version()}, and ours",
        "",
        "<!-- page -->",
        "",
        "This part is made by `python -m tests.helpers.upstream` (`make upstream`) from the installed torch. Tests",
        "fail if it is out of date, or if a difference has no reason. Annotations are not compared. Programs that",
        "behave differently have [a table](compatibility.md#programs-that-behave-differently).",
        "",
        "| name | torch | here |",
        "|---|---|---|",
        *(f"| `{row.name}` | `{row.torch}` | {_ours(row)} |" for row in rows),
        "",
        "## Differences",
        "",
        "| difference | reason |",
        "|---|---|",
        *(f"| `{each}` | {REASONS[each]} |" for row in rows for each in row.differences),
        "",
        "## Calls that only this library accepts",
        "",
        "| call | torch | here | row of [the table](compatibility.md#programs-that-behave-differently) |",
        "|---|---|---|---|",
        *(f"| {call} | {' | '.join(results)} |" for call, results in _MORE_CALLS.items()),
        "",
        "## Names that only this library has",
        "",
        "The [API reference](api.md) describes them: " + ", ".join(f"`{name}`" for name in sorted(_MORE)) + ".",
        "",
        "Methods of `FSDPModule`: " + ", ".join(only_ours) + ".",
    ]
    return "\n".join([*lines, ""])


def _ours(row: Comparison) -> str:
    if row.ours == row.torch:
        return "the same"
    return f"`{row.ours}`" if row.ours else "no"


if __name__ == "__main__":
    missing = [each for row in comparisons() for each in row.differences if each not in REASONS]
    if missing:
        sys.exit(f"These differences from torch {torch.__version__} have no reason in {__file__}: {', '.join(missing)}")
    page().write_text(render())
