"""The names at the top of the package, and the methods of sharded modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import composable_fsdp
from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.errors import MissingNameError, UnsupportedError
from tests._internals import state_of
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
    ("name", "home"),
    [
        ("MeshError", "errors"),
        ("LowPrecisionWarning", "errors"),
        ("JoinPart", "plugins.weight_stream"),
        ("ModelDescription", "diagnostics"),
    ],
)
def test_importing_a_class_from_the_top_says_where_it_is(name: str, home: str) -> None:
    text = rf"^{name} is in composable_fsdp\.{home}: from composable_fsdp\.{home} import {name}$"
    with pytest.raises(ImportError, match=text):
        getattr(composable_fsdp, name)
    with pytest.raises(ImportError, match=text):
        exec(f"from composable_fsdp import {name}")
    with pytest.raises(AttributeError, match=r"^module 'composable_fsdp' has no attribute 'Shard'$"):
        composable_fsdp.Shard  # noqa: B018


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("save", r"^save is in composable_fsdp\.checkpoint: from composable_fsdp\.checkpoint import save$"),
        ("FSDP", r"^FSDP is FSDP1's wrapper: fully_shard\(module\) shards .* from composable_fsdp import fully_shard$"),
        ("FullyShardedDataParallel", r"^FullyShardedDataParallel is FSDP1's wrapper: fully_shard\(module\)"),
        ("summon_full_params", r"^summon_full_params is unsharded_params here: "),
    ],
)
def test_names_of_other_libraries_say_what_to_import(name: str, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        exec(f"from composable_fsdp import {name}")


BEFORE_THE_FIRST_NAME = """
import sys, torch
import composable_fsdp

ours = {name for name in sys.modules if name.startswith("composable_fsdp")}
assert ours == {"composable_fsdp", "composable_fsdp._first_use"}, ours
from composable_fsdp import *
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
@pytest.mark.parametrize("first", ["composable_fsdp.interop", "composable_fsdp.plan", "composable_fsdp.testing"])
def test_what_shards_by_itself_attaches_the_plugins(first: str) -> None:
    """The test kit calls functions that import the names themselves."""
    program = f"import sys, {first}\nprint('composable_fsdp._attached' in sys.modules)"
    assert run_program(program).stdout.split() == [str(first != "composable_fsdp.testing")]


def test_submodules_are_attributes_and_are_listed() -> None:
    program = "import composable_fsdp as c; print(c.checkpoint.save, c.plan, c.interop.patch_torch, c.testing, dir(c))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    listed = set(dir(composable_fsdp))
    assert listed == {*composable_fsdp.__all__, *submodules(), "__version__"}


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
        ("set_version_check", r'.* is now model\.set_in_place_check\("all"\) for True, and \("off"\) for False\.'),
        ("set_all_gather_layout", r".* leave it out, since large parameters are gathered into their place without cop"),
        ("set_all_gather_output_fn", r".* leave it out: shards of dim 0 need no copy .* fsdp_post_all_gather of a ten"),
        ("set_reduce_scatter_input_fn", r".* leave it out, or change what is sent by comm_policy\."),
        (
            "set_stable_storage",
            r".* leave it out, and compile blocks with block.compile\(\): their graphs hold no coll",
        ),
    ],
)
def test_a_method_that_is_gone_says_what_to_use_and_is_no_attribute(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for name in ("choice", "options"):
        with pytest.raises(MissingNameError, match=f"^{name} of a schedule is gone: .* Keep what you set"):
            getattr(model.schedule(), name)
    assert not hasattr(model.schedule(), "others")


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("plugins", "PASSES", r"^plugins\.PASSES is now plugins\.PLAN_CHANGES"),
        ("wrap", "balanced", r"^wrap\.balanced is"),
    ],
)
def test_an_import_of_a_former_name_of_a_module_says_what_to_use(module: str, name: str, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        exec(f"from composable_fsdp.{module} import {name}")
