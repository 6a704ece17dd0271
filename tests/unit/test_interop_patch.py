"""``patch_torch`` makes imports from torch return this library's FSDP until the patch is undone."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._composable.fsdp
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import composable_fsdp as ours
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.interop import allow_fsdp_on_cpu, patch_torch

pytestmark = [pytest.mark.behaviour("I-01"), pytest.mark.usefixtures("one_rank")]

ORIGINAL = (torch_fsdp.fully_shard, torch_fsdp.register_fsdp_forward_method, torch_fsdp.share_comm_ctx)
TORCH = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed.fsdp._fully_shard")


@pytest.fixture
def client() -> Iterator[ModuleType]:
    """Register an empty module as imported."""
    module = ModuleType("client_of_torch")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def imports(module: ModuleType, source: str) -> None:
    exec(source, vars(module))


def current() -> tuple[object, ...]:
    return torch_fsdp.fully_shard, torch_fsdp.register_fsdp_forward_method, torch_fsdp.share_comm_ctx


@pytest.mark.parametrize("name", TORCH)
def test_names_imported_from_torch_while_patched_are_ours_and_train(client: ModuleType, name: str) -> None:
    with patch_torch():
        imports(client, f"from {name} import fully_shard as shard, register_fsdp_forward_method as register")
        model = client.shard(nn.Linear(3, 3), mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        client.register(model, "extra_repr")
    out = model(torch.ones(2, 3))
    out.sum().backward()
    assert out.dtype is torch.bfloat16
    assert model.weight.grad is not None
    assert isinstance(model, ours.FSDPModule)


def test_modules_that_have_imported_the_names_get_ours_and_then_their_own_back(client: ModuleType) -> None:
    imports(client, "from torch.distributed.fsdp import fully_shard, share_comm_ctx as share")
    with patch_torch():
        assert client.fully_shard.__wrapped__ is ours.fully_shard
        assert client.share.__wrapped__ is ours.share_comm_ctx
    assert client.fully_shard is ORIGINAL[0]
    assert client.share is ORIGINAL[2]


def test_modules_imported_in_between_get_torchs_own_objects_back(client: ModuleType) -> None:
    patch = patch_torch()
    imports(client, "from torch.distributed._composable.fsdp import fully_shard")
    imports(client, "from composable_fsdp import fully_shard as chosen")
    patch.undo()
    assert client.fully_shard is ORIGINAL[0]
    assert client.chosen is ours.fully_shard, "a direct import of the library is unchanged"
    assert current() == ORIGINAL


def test_the_classes_of_torch_stay_what_they_are() -> None:
    before = {name: getattr(torch_fsdp, name) for name in torch_fsdp.__all__}
    with patch_torch():
        changed = {name for name, value in before.items() if getattr(torch_fsdp, name) is not value}
    assert changed == {"fully_shard", "register_fsdp_forward_method", "share_comm_ctx"}


def test_patches_nest_and_the_last_one_undone_gives_the_names_back() -> None:
    outer = patch_torch()
    with patch_torch():
        outer.undo()
        outer.undo()
        assert torch_fsdp.fully_shard is not ORIGINAL[0]
    assert current() == ORIGINAL


def test_an_exception_inside_undoes_the_patch() -> None:
    with pytest.raises(KeyError), patch_torch():
        raise KeyError
    assert current() == ORIGINAL


def test_patching_is_refused_while_a_model_sharded_by_torch_is_alive() -> None:
    model = torch_fsdp.fully_shard(nn.Sequential(nn.Linear(3, 3)))
    text = r"sharded 1 modules that are still in use \(Sequential\).*Call patch_torch\(\)"
    with pytest.raises(ConfigurationError, match=text):
        patch_torch()
    assert current() == ORIGINAL
    del model
    with patch_torch():
        pass


def test_a_submodule_sharded_by_torch_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    torch_fsdp.fully_shard(model[0])
    with pytest.raises(ConfigurationError, match=r"torch's own fully_shard has sharded '0' of the Sequential"):
        ours.fully_shard(model)
    with pytest.raises(ConfigurationError, match=r"has sharded 'FSDPLinear' of the Linear given to ours"):
        ours.fully_shard(model[0])
    del model
    gc.collect()


def fake_accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put modules in the place of accelerate's, with a state that drops its plugin on CPU, and return its class."""

    class State:
        _shared_state: dict[str, str] = {}  # noqa: RUF012
        _mixed_precision = "bf16"

        def __init__(self, *, cpu: bool = True, fsdp_plugin: object = None) -> None:
            self.distributed_type = "MULTI_CPU" if cpu else "MULTI_GPU"
            self.fsdp_plugin: object = None

    kinds = SimpleNamespace(MULTI_CPU="MULTI_CPU", FSDP="FSDP")
    fakes: dict[str, dict[str, object]] = {
        "accelerate": {},
        "accelerate.state": {"AcceleratorState": State, "PartialState": State},
        "accelerate.utils": {"DistributedType": kinds},
    }
    for name, members in fakes.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return State


def test_accelerate_is_given_its_plugin_on_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fake_accelerate(monkeypatch)
    asked: list[str] = []
    plugin = SimpleNamespace(set_mixed_precision=asked.append)
    assert state(fsdp_plugin=plugin).fsdp_plugin is None
    allow_fsdp_on_cpu()
    allow_fsdp_on_cpu()
    made = state(fsdp_plugin=plugin)
    assert (made.distributed_type, made.fsdp_plugin, asked) == ("FSDP", plugin, ["bf16"])
    assert state._shared_state == {"distributed_type": "FSDP"}
    assert state().distributed_type == "MULTI_CPU"
    assert state(cpu=False, fsdp_plugin=plugin).distributed_type == "MULTI_GPU"


def test_allowing_cpu_without_accelerate_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    with pytest.raises(ConfigurationError, match=r"^accelerate cannot be imported .*: pip install accelerate\.$"):
        allow_fsdp_on_cpu()
