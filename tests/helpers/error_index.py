"""The index of errors and warnings, made from the package's code: ``python -m tests.helpers.error_index`` writes it.

A text is the first argument of a class of ``composable_fsdp.errors``, or of ``warnings.warn``. Parts that are known
only when it is raised are shown as ``…``. Its first sentence is the cause, the rest the remedy. A text of one sentence
has the remedy of its class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composable_fsdp import errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "composable_fsdp"
PAGE = ROOT / "docs" / "errors.md"

SECTIONS = {
    "Sharding a model": (
        "_api",
        "_core/mesh.py",
        "_core/full_mesh.py",
        "errors.py",
        "init",
        "policies.py",
        "_torch_version.py",
        "wrap",
        "interop",
    ),
    "Running and training it": ("_core", "plugins", "optim"),
    "Between ranks": (
        "_core/comm.py",
        "_consistency",
        "plugins/gloo",
        "plugins/shared_memory",
        "plugins/watched_waits.py",
    ),
    "State dicts and checkpoints": ("checkpoint",),
    "Codecs": ("codecs",),
    "Plans": ("plan",),
    "Diagnostics, timelines and meters": ("diagnostics",),
    "Command line": ("cli",),
}
"""The places in the package whose texts a section has."""


def place_of(path: str) -> str:
    """Return the place of the file ``path``: the first folder, or that of a plugin that has a section of its own."""
    plugin = "/".join(path.split("/")[:2])
    return plugin if any(plugin in places for places in SECTIONS.values()) else path.split("/")[0]


REMEDIES = {
    "ArgumentTypeError": "Pass what the text names.",
    "ConfigurationError": "Change the argument or the call as the text says.",
    "ConflictError": "Leave out one of the two calls.",
    "MeshError": "Make [a mesh](how-to/hybrid-and-tensor-parallel.md) as the text says.",
    "ParameterError": "Change the parameter, or the hook that the text names, as it says.",
    "DeviceError": "Move or [initialize](conveniences.md#initialize-a-model) the parameters.",
    "ShardDimError": "Return a dim in the range that the text names.",
    "ExtensionError": "Give the tensor [hooks of this form](extensions.md#tensor-subclasses-with-all-gather-hooks).",
    "LifecycleError": "Make the call at another time, as the text says.",
    "GradientError": "Find the gradients with `find_nonfinite`, and skip the step.",
    "PeerError": "Read the first error in the output of the rank that the text names: [failures](faults.md).",
    "DivergenceError": "Let all ranks do the same: [when it hangs](how-to/hang.md).",
    "CheckpointError": "Restore the file, or load another checkpoint: "
    "[damaged checkpoints](checkpoints.md#save-and-resume).",
    "MissingNameError": "Use what the text names instead.",
    "UnsupportedError": "Use what the text names instead.",
    "warning": "Filter the warning if it is meant so.",
}
"""What to do about an error of a class whose text says no more."""

FOREIGN = {
    "got mixed torch.Tensor and DTensor": (
        "Something computed with a sharded parameter without a call of the sharded module: a plain module in it was "
        "called directly, or its weight was used (`x @ layer.weight`). A note below the error names the parameter.",
        "Call the sharded module; or [register](how-to/evaluation.md#generate) the method that computes; or use "
        "`unshard()` and `reshard()`.",
    ),
    "Attempted to access the data pointer on an invalid python storage": (
        "Something read the memory of a shard as that of a full tensor, for example `save_pretrained` or safetensors' "
        "`save_file`.",
        "Take `full_tensor()` on all ranks, or call it inside [`unsharded_params(model, "
        "writeback=False)`](how-to/peft.md#save-load-and-merge), or use [`save_safetensors`](checkpoints.md).",
    ),
    "setStorage: … are out of bounds for storage of size 0, or a segmentation fault": (
        "A reference to an unsharded parameter was used after its memory was freed.",
        "Keep a [copy](how-to/checks.md#error-checks), or use `unsharded_params`.",
    ),
    "a leaf Variable that requires grad is being used in an in-place operation": (
        "A parameter was changed outside of `torch.no_grad()`.",
        "Write under `torch.no_grad()`.",
    ),
    "Connection refused, after a restart by torchrun": (
        "torchrun keeps its store over restarts, with the addresses of processes that are gone.",
        "Set [`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`](launch.md#what-the-program-needs) for torchrun.",
    ),
    "environment variable RANK expected, but not set": (
        "The program was started without torchrun, or another launcher.",
        "`torchrun --standalone --nproc-per-node 2 train.py`.",
    ),
    "Default process group has not been initialized": (
        "A collective or a mesh was used before the process group.",
        "Call `init_device_mesh` first, which starts the process group.",
    ),
    "Duplicate GPU detected": (
        "Two ranks of a host use one GPU.",
        '`torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` at the begin of the program.',
    ),
    "No backend type associated with device type cpu": (
        "A collective on CPU tensors, for example of offloaded shards, over a process group that has NCCL only.",
        '`init_process_group("cpu:gloo,cuda:nccl")`: [offload](how-to/offload.md).',
    ),
}
"""Texts of torch that users of sharded models see: cause and remedy."""


@dataclass(frozen=True)
class IndexedError:
    """An error or warning that the package can raise. ``kind``: the name of its class. ``place``: the file that raises
    it, in the package. ``text``: its text, with ``…`` for parts that are not known before."""

    kind: str
    place: str
    text: str

    @property
    def cause(self) -> str:
        """The first sentence of the text."""
        return self._sentences()[0]

    @property
    def remedy(self) -> str:
        """The other sentences; if there is none, the remedy of the class."""
        rest = self._sentences()[1:]
        if rest:
            return _escaped(rest[0])
        return REMEDIES[self.kind if self.kind in REMEDIES else "warning"]

    def _sentences(self) -> list[str]:
        return re.split(r"(?<=[.])\s+(?=[A-Z`'])", self.text, maxsplit=1)


def indexed_errors() -> Iterator[IndexedError]:
    """Yield every error and warning in the order of files and lines. A text without a constant part is left out."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    functions = {
        node.name: returned
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for returned in [next((each.value for each in reversed(node.body) if isinstance(each, ast.Return)), None)]
        if returned is not None
    }
    for path, tree in trees.items():
        texts = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.JoinedStr))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        for call in sorted(calls, key=lambda node: node.lineno):
            kind = _kind(call)
            if kind is None:
                continue
            text = re.sub(r"\s+", " ", _text(call.args[0], texts, functions)).strip()
            if len(re.sub(r"[…\W]", "", text)) > 10:
                yield IndexedError(kind, path.relative_to(PACKAGE).as_posix(), text)


def _kind(call: ast.Call) -> str | None:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name in errors.__all__:
        return name
    if ast.unparse(call.func) != "warnings.warn":
        return None
    return ast.unparse(call.args[1]) if len(call.args) > 1 else "UserWarning"


def _text(node: ast.expr, texts: Mapping[str, ast.expr], functions: Mapping[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, texts, functions) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        named = texts.get(ast.unparse(node.value))
        return str(named.value) if isinstance(named, ast.Constant) else "…"
    if isinstance(node, ast.BinOp):
        return _text(node.left, texts, functions) + _text(node.right, texts, functions)
    if isinstance(node, ast.Name) and node.id in texts:
        return _text(texts[node.id], {}, functions)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
        return _text(functions[node.func.id], {}, {})
    return "…"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]#~$])", r"\\\1", text)


def render(found: Sequence[IndexedError]) -> str:
    lines = [
        "# Errors: causes and remedies",
        "",
        "This page is made from the code by `python -m tests.helpers.error_index` (`make errors`). Search it for the",
        "constant part of a text; `…` is a part that differs. Some texts have more lines, for ranks and parameters.",
        "Every class of errors is below `FSDPError`, and below the builtin class that torch raises in the same case.",
        "All are in `composable_fsdp.errors`, with the warnings, which are below `UserWarning`.",
        "",
        "| class | meaning |",
        "|---|---|",
        *(f"| `{name}` | {_meaning(name)} |" for name in errors.__all__),
        "",
        "## Errors of torch",
        "",
        *_table((f"`{text}`", cause, remedy) for text, (cause, remedy) in FOREIGN.items()),
    ]
    for title, places in SECTIONS.items():
        rows = dict.fromkeys(each for each in found if place_of(each.place) in places)
        lines += ["", f"## {title}", "", "| cause | class | remedy |", "|---|---|---|"]
        lines += [f"| {_escaped(each.cause)} | `{each.kind}` | {each.remedy} |" for each in rows]
    return "\n".join([*lines, ""])


def _table(rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield from ("| text | cause | remedy |", "|---|---|---|")
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _meaning(name: str) -> str:
    return " ".join(str(getattr(errors, name).__doc__).split("\n\n")[0].split()).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(render(list(indexed_errors())))
