"""The names at the top of the package, the methods of sharded modules, and their counterparts in torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import _fully_shard
from torch.torch_version import TorchVersion

import composable_fsdp
from composable_fsdp import (
    FSDPModule,
    fully_shard,
    offload_optimizer,
    stream_changed_params,
    stream_full_params,
    to_empty,
)
from composable_fsdp.checkpoint import load, save
from composable_fsdp.errors import ArgumentTypeError, MissingNameError, UnsupportedError
from tests._internals import NEWEST, OLDEST, state_of
from tests.helpers import upstream
from tests.helpers.fresh_process import run_program
from tests.helpers.sharding import sharded

pytestmark = pytest.mark.usefixtures("one_rank")
MOST_NAMES = 47
MOST_METHODS = 32
"""Those that modules have without sharding, such as ``zero_grad``, do not count."""


def methods_of(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


def test_few_names_are_at_the_top_and_few_methods_beside_those_of_torch() -> None:
    assert len(composable_fsdp.__all__) <= MOST_NAMES
    assert all(hasattr(composable_fsdp, name) for name in composable_fsdp.__all__)
    model = fully_shard(nn.Linear(2, 2))
    for name in methods_of(torch_fsdp.FSDPModule) - methods_of(FSDPModule):
        with pytest.raises(MissingNameError, match=f"^{name} is "):
            getattr(model, name)
    assert len(methods_of(FSDPModule) - set(dir(nn.Module))) <= MOST_METHODS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("save", r"^save is in composable_fsdp\.checkpoint: from composable_fsdp\.checkpoint import save$"),
        ("FSDP", r"^FSDP is FSDP1's wrapper: fully_shard\(module\) shards .* from composable_fsdp import fully_shard$"),
        ("FullyShardedDataParallel", r"^FullyShardedDataParallel is FSDP1's wrapper: fully_shard\(module\)"),
        ("summon_full_params", r"^summon_full_params is unsharded_params here: "),
        ("apply_to_full_params", r"^apply_to_full_params is gone: .* unsharded_params\(module, recurse=False\)$"),
        ("tie_groups", r"^tie_groups is gone: name the owner .* shared_from="),
        ("plan.sweep", r"^plan\.sweep is gone: call plan for each setting"),
        ("plugins.PASSES", r"^plugins\.PASSES is now plugins\.PLAN_CHANGES"),
        ("wrap.balanced", r"^wrap\.balanced is"),
        ("errors.LowPrecisionWarning", r"^errors\.LowPrecisionWarning is gone: remove its filter"),
        ("plugins.weight_stream.FlushHeader", r"^plugins\.weight_stream\.FlushHeader is gone: a Flush has its values"),
    ],
)
def test_names_of_other_libraries_and_former_ones_say_what_to_import(name: str, text: str) -> None:
    module, _, imported = f"composable_fsdp.{name}".rpartition(".")
    with pytest.raises(ImportError, match=text):
        exec(f"from {module} import {imported}")


def test_modules_of_earlier_versions_say_what_to_do_instead() -> None:
    with pytest.raises(ImportError, match=r"^testing is gone: start ranks with torchrun"):
        import_module("composable_fsdp.testing")


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        (offload_optimizer, "keep_bytes", r"all state rests in host memory\. Leave it out, or make two optimizers, "),
        (to_empty, "recurse", r"leave it out: parameters of modules below get memory too\.$"),
        (stream_full_params, "ahead", r"one bucket is gathered ahead\. Leave it out\.$"),
        (stream_changed_params, "device", r"move what a bucket or a flush has, such as bucket\.packed\.cpu\(\)\.$"),
        (save, "averages", r"an AveragedModel .* in a folder of its own: save\(folder, averaged\)\.$"),
        (load, "averages", r"an AveragedModel .* in a folder of its own: save\(folder, averaged\)\.$"),
        (save, "weights_only", r"leave it out, and admit classes with torch\.serialization\.add_safe_globals "),
        (load, "weights_only", r"leave it out, and admit classes with torch\.serialization\.add_safe_globals "),
    ],
)
def test_removed_keywords_of_functions_say_what_to_do(function: Callable[..., Any], name: str, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{function.__name__} has no {name}= in this version: {text}"):
        function(**{name: None})
    with pytest.raises(ArgumentTypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'odd'"):
        function(odd=3)
    assert name not in inspect.signature(function).parameters
    with pytest.raises(TypeError, match=r"missing .* required positional"):
        function()


BEFORE_THE_FIRST_NAME = """
import sys, torch
import composable_fsdp

ours = {name for name in sys.modules if name.startswith("composable_fsdp")}
assert ours == {"composable_fsdp", "composable_fsdp._first_use"}, ours
of_checkpoints = {"torch.distributed.checkpoint", "rich", "safetensors"} - set(sys.modules)
from composable_fsdp import *
assert not of_checkpoints & set(sys.modules)
from composable_fsdp.plugins import OBSERVERS

kinds = [type(each).__name__ for each in OBSERVERS]
assert [kinds.count(name) for name in ("ModelCheck", "TimelineRecorder", "LocalSteps")] == [1, 1, 1]
print(*sorted(name for name in composable_fsdp.__all__ if name in globals()))
"""


@pytest.mark.multiprocess
def test_names_are_imported_at_their_first_use_and_attach_the_plugins_once() -> None:
    done = run_program(BEFORE_THE_FIRST_NAME)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(composable_fsdp.__all__)


@pytest.mark.multiprocess
@pytest.mark.parametrize("first", ["composable_fsdp.interop", "composable_fsdp.plan"])
def test_what_shards_by_itself_attaches_the_plugins(first: str) -> None:
    program = f"import sys, {first}\nprint('composable_fsdp._attached' in sys.modules)"
    assert run_program(program).stdout.split() == ["True"]


def test_submodules_are_attributes_and_are_listed() -> None:
    program = "import composable_fsdp as c; print(c.checkpoint.save, c.plan, c.interop.patch_torch, dir(c))"
    done = run_program(program)
    assert not done.returncode, done.stderr
    listed = set(dir(composable_fsdp))
    assert listed == {*composable_fsdp.__all__, *submodules(), "__version__"} - {"testing"}


def submodules() -> set[str]:
    folder = Path(composable_fsdp.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    return {name for name in names - {"cli", "init"} if not name.startswith("_")}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("module", r"^module is of FSDP1's wrapper\. Use the model itself: fully_shard wraps nothing\.$"),
        ("no_sync", r"^no_sync is of FSDP1's wrapper\. Use composable_fsdp\.no_sync\(model\), or "),
        ("summon_full_params", r".* Use composable_fsdp\.unsharded_params\(model\)\.$"),
        ("clip_grad_norm_", r".* Use composable_fsdp\.clip_grad_norm_\(model\.parameters\(\), max_norm\)\.$"),
        ("set_requires_gradient_sinc", r"^'FSDPLinear' object has no .* Did you mean 'set_requires_gradient_sync'\?$"),
        ("set_input_embeddings", r"^'FSDPLinear' object has no attribute 'set_input_embeddings'$"),
    ],
)
def test_methods_of_fsdp1_and_mistyped_setters_say_what_to_use(name: str, text: str) -> None:
    model = fully_shard(nn.Linear(2, 2))
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=text):
        getattr(model, name)


BY_HAND = r"is not supported in this version; set_schedule\(prefetch_limit=, max_fused_bytes=, .* by hand"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("set_prefetch_limit", r"set_prefetch_limit is now model\.set_schedule\(prefetch_limit=\.\.\.\)\."),
        ("set_max_unsharded_bytes", r".* is now model\.set_schedule\(max_unsharded_bytes=\.\.\.\)\."),
        ("set_max_fused_bytes", r".* is now model\.set_schedule\(max_fused_bytes=\.\.\.\)\."),
        ("calibrate", rf"calibrate {BY_HAND}"),
        ("set_costs", rf"set_costs {BY_HAND}"),
        ("costs", rf"costs {BY_HAND}"),
        (
            "set_max_extra_bytes",
            r"set_max_extra_bytes is not supported in this version; set_schedule\(prefetch_limit=, max_f.* by hand",
        ),
        ("set_version_check", r'.* is now model\.set_in_place_check\("counted"\) for True, and \("off"\) for False\.'),
        ("set_all_gather_layout", r".* leave it out, since large parameters are gathered into their place without cop"),
        ("set_all_gather_output_fn", r".* leave it out: shards of dim 0 need no copy .* fsdp_post_all_gather of a ten"),
        ("set_reduce_scatter_input_fn", r".* leave it out, or change what is sent by comm_policy\."),
        (
            "set_stable_storage",
            r".* leave it out, and compile blocks with block.compile\(\): their graphs hold no coll",
        ),
    ],
)
def test_a_method_that_is_gone_says_what_to_use_and_is_no_attribute(name: str, text: str, monkeypatch) -> None:
    for later in (False, True):
        if later:  # of torch, that has such a method
            monkeypatch.setattr(torch_fsdp.FSDPModule, name, lambda self: None, raising=False)
        model = fully_shard(type("Layer", (nn.Linear,), {})(3, 3))
        assert not hasattr(model, name)
        with pytest.raises(MissingNameError, match=f"^{text}") as caught:
            getattr(model, name)
        assert isinstance(caught.value, AttributeError)
        assert isinstance(caught.value, UnsupportedError)


def test_other_attributes_are_those_of_the_module() -> None:
    class Named(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.costs = nn.Identity()
            self.register_buffer("seen", torch.zeros(1))

    model: Any = fully_shard(Named())
    assert model.weight is dict(model.named_parameters())["weight"]
    assert (model.seen, model.costs) == (dict(model.named_buffers())["seen"], dict(model.named_children())["costs"])
    with pytest.raises(AttributeError, match=r"^'FSDPNamed' object has no attribute 'absent'$") as caught:
        model.absent  # noqa: B018
    assert type(caught.value) is AttributeError
    assert not hasattr(nn.Module.__new__(type(model)), "absent"), "nor before nn.Module.__init__"


def test_a_module_that_looks_attributes_up_itself_goes_on_to() -> None:
    class Delegating(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return "its own" if name == "costs" else super().__getattr__(name)

    model: Any = fully_shard(Delegating(3, 3))
    assert model.costs == "its own"
    assert model.weight is dict(model.named_parameters())["weight"]


def test_options_of_the_schedule_are_set_one_by_one_and_all_or_none_of_a_call() -> None:
    def options() -> tuple[int | None, ...]:
        given = state_of(layer).options
        return given.prefetch_limit, given.max_unsharded_bytes, given.max_fused_bytes

    layer = fully_shard(nn.Linear(3, 3))
    model = sharded(layer)
    assert options() == (None, None, None)
    model.set_schedule(prefetch_limit=3)
    model.set_schedule(max_unsharded_bytes=8, max_fused_bytes=0)
    assert options() == (3, 8, 0)
    with pytest.raises(
        composable_fsdp.errors.ConfigurationError, match=r"^max_fused_bytes must be an int of at least 0"
    ):
        model.set_schedule(prefetch_limit=2, max_fused_bytes=-1)
    assert options() == (3, 8, 0)
    model.set_schedule(prefetch_limit=None)
    assert options() == (None, 8, 0)


def test_what_costs_chose_is_gone_and_says_what_to_set() -> None:
    model: Any = fully_shard(nn.Linear(3, 3))
    with pytest.raises(MissingNameError, match=r"^set_schedule has no costs= in this version; .* by hand"):
        model.set_schedule(costs="costs.json")


OF_SOME_RELEASES = {
    "fully_shard(dp_mesh_dims)",  # 2.11
    "MixedPrecisionPolicy(param_dtype_override_fn)",  # up to 2.14
    "FSDPModule.set_keep_unsharded_storage",  # from 2.15 on
    "GradientReductionHandle(root)",
}


def test_every_difference_from_the_installed_torch_has_a_reason_and_every_reason_a_difference() -> None:
    differences = {each for row in upstream.comparisons() for each in row.differences}
    assert differences <= upstream.REASONS.keys()
    assert upstream.REASONS.keys() - differences <= OF_SOME_RELEASES


def test_the_page_for_the_installed_torch_is_up_to_date() -> None:
    assert upstream.page().read_text() == upstream.render(), "python -m tests.helpers.upstream makes it"


def is_in_torch(name: str) -> bool:
    """Return whether the installed torch's FSDP2 has ``name``, of a module, a member, a parameter or a word."""
    if name.startswith("torch."):
        return find_spec(name) is not None
    owner, _, rest = name.replace("(", ".").rstrip(")").partition(".")
    found = getattr(torch_fsdp, owner, None)
    if not rest:
        sources = Path(_fully_shard.__file__).parent.glob("*.py")
        return found is not None or any(re.search(rf"\b{name}\b", source.read_text()) for source in sources)
    return rest in inspect.signature(found).parameters if "(" in name else hasattr(found, rest)  # type: ignore[arg-type]


def test_names_are_in_the_releases_that_the_page_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text()
    section = text.partition("## Releases of the names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (no release|[\d.]+)[^|]* \| (.*) \|$", section, flags=re.MULTILINE)
    assert [release for release, _ in rows] == ["2.11", "2.13", "2.14", "2.15", "no release"]
    for release, names in rows:
        expected = release != "no release" and TorchVersion(torch.__version__) >= TorchVersion(release)
        for name in re.findall("`(.*?)`", names):
            assert is_in_torch(name) is expected, f"{name} in torch {torch.__version__}"


def test_a_torch_that_is_newer_than_the_tested_ones_is_warned_of_once_and_not_refused() -> None:
    program = """
import sys, warnings, torch
warnings.resetwarnings()
warnings.showwarning = lambda message, category, file, *_: print(category.__name__, file, message)
torch.__version__ = sys.argv[1]
import composable_fsdp, composable_fsdp.optim
from composable_fsdp import fully_shard
"""
    newer = run_program(program, "2.16.0.dev20261128+cpu")
    assert newer.stdout.splitlines() == [
        "UntestedTorchWarning <string> This is torch 2.16.0.dev20261128+cpu; composable_fsdp was tested with torch "
        "2.11 to 2.15. It uses private parts of torch, which may have changed. If training fails, install one of "
        "these, or a newer composable_fsdp. Else filter this composable_fsdp.errors.UntestedTorchWarning."
    ]
    assert run_program(program, "2.15.3+cu132").stdout == ""


def test_the_range_of_torch_is_the_same_wherever_it_is_said() -> None:
    root = Path(__file__).parents[2]
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    assert f'"torch>={oldest}",' in (root / "pyproject.toml").read_text()
    assert f"torch-{oldest}%20to%20{newest}-" in (root / "README.md").read_text()
    for page in ("README.md", "docs/index.md", "docs/compatibility.md"):
        assert f"torch {oldest} to {newest}" in " ".join((root / page).read_text().split()), page
