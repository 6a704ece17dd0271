"""What other libraries use of torch's FSDP2: private names of the state of a module, and ``patch_torch``."""

from __future__ import annotations

import abc
import copy
import gc
import re
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._composable.fsdp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

import composable_fsdp as ours
from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from composable_fsdp.errors import ConfigurationError, MissingNameError, UnsupportedError
from composable_fsdp.interop import allow_fsdp_on_cpu, patch_torch
from composable_fsdp.policies import ReshardKind
from tests._internals import ClientState, ParameterState, state_of

pytestmark = [pytest.mark.behaviour("I-01"), pytest.mark.usefixtures("one_rank")]
torch_state: Any = torch_fsdp.fully_shard.state  # type: ignore[attr-defined]


def chain() -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.ReLU())
    fully_shard(model[0])
    fully_shard(list(model[1]))
    return fully_shard(model)


def test_torch_finds_the_state_of_a_sharded_module() -> None:
    model = chain()
    for module in model.modules():
        assert (torch_state(module) is None) is not isinstance(module, FSDPModule)
        if isinstance(module, FSDPModule):
            assert module._get_fsdp_state() is torch_state(module)
    assert fully_shard.state(model) is torch_state(model)  # type: ignore[attr-defined]


def test_all_states_of_the_root_are_listed_once_per_group() -> None:
    model = chain()
    model(torch.ones(2, 3))
    states = torch_state(model)._state_ctx.all_states
    assert states == [torch_state(model), torch_state(model[0]), torch_state(model[1][0])]
    assert states == torch_state(model[0])._state_ctx.all_states
    assert [len(state._fsdp_param_groups) for state in states] == [0, 1, 1]
    assert torch_state(model)._fsdp_param_group is None
    first, second = (module._get_fsdp_state()._fsdp_param_group.fsdp_params for module in model[1])
    assert len(first) == 4
    assert all(a.sharded_param is b.sharded_param for a, b in zip(first, second, strict=True))


def test_parameters_show_in_both_forms() -> None:
    model = chain()
    (weight, bias) = torch_state(model[0])._fsdp_param_group.fsdp_params
    assert weight.sharded_param is model[0].weight
    assert bias.sharded_param is model[0].bias
    model[0].unshard()
    assert weight.unsharded_param is weight._unsharded_param is model[0].weight


def test_a_client_can_end_the_accumulation_of_microbatches() -> None:
    model = chain()
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    expected = copy.deepcopy(model)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is None for p in sharded_parameters(model))
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = torch_state(model)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
            assert state_of(model[0]).group.parameter_state is ParameterState.SHARDED
    state._root_post_backward_final_callback()
    expected.set_requires_gradient_sync(True)
    (2 * expected(torch.ones(2, 3)).sum()).backward()
    for actual, wanted in zip(sharded_parameters(model), sharded_parameters(expected), strict=True):
        assert torch.equal(actual.grad.to_local(), wanted.grad.to_local())


def sharded_parameters(model: nn.Module) -> list[Any]:
    states = {state_of(module): None for module in model.modules() if isinstance(module, FSDPModule)}
    return [parameter.sharded for state in states for parameter in state.group.parameters]


def test_gradients_assigned_to_unsharded_parameters_are_reduced() -> None:
    model: Any = fully_shard(nn.Linear(3, 3), reshard_after_forward=False)
    out = model(torch.ones(2, 3)).sum()
    unsharded = list(model.parameters())
    model.set_reshard_after_backward(False)
    for parameter, gradient in zip(unsharded, torch.autograd.grad(out, unsharded), strict=True):
        parameter.grad = gradient
    torch_state(model)._fsdp_param_group.post_backward()
    torch_state(model)._root_post_backward_final_callback()
    model.reshard()
    assert torch.equal(model.weight.grad.to_local(), torch.full((3, 3), 2.0))


def test_hooks_can_be_removed_and_registered_again_with_a_wrapper() -> None:
    model: Any = fully_shard(nn.Linear(3, 3))
    state, calls = torch_state(model), []
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    group = state._fsdp_param_group

    def around(name: str, function: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return inner

    pre = around("pre-forward", state._pre_forward)
    state._pre_forward_hook_handle = model.register_forward_pre_hook(pre, prepend=True, with_kwargs=True)
    state._post_forward_hook_handle = model.register_forward_hook(around("post-forward", state._post_forward))
    group.pre_backward = around("pre-backward", group.pre_backward)
    group.post_backward = around("post-backward", group.post_backward)

    model(torch.ones(2, 3)).sum().backward()
    assert list(dict.fromkeys(calls)) == ["pre-forward", "post-forward", "pre-backward", "post-backward"]
    assert torch.equal(model.weight.grad.to_local(), torch.full((3, 3), 2.0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 4))
    model(torch.ones(2, 3)).sum().backward()


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self.inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_torchs_own_registration_of_forward_methods_works_on_ours() -> None:
    model: Any = fully_shard(Scorer())
    torch_fsdp.register_fsdp_forward_method(model, "score")
    for _ in range(2):
        model.score(torch.ones(2, 3)).sum().backward()
        assert torch.equal(model.inner.weight.grad.to_local(), torch.full((3, 3), 4.0))
        assert state_of(model).group.parameter_state is ParameterState.SHARDED
        model.zero_grad()


def test_a_copy_has_a_state_of_its_own() -> None:
    model = chain()
    clone = copy.deepcopy(model)
    state = torch_state(clone[0])
    assert state is not torch_state(model[0])
    assert state._fsdp_param_group.fsdp_params[0].sharded_param is clone[0].weight
    state._pre_forward_hook_handle.remove()
    assert len(model[0]._forward_pre_hooks) == 1
    assert len(clone[0]._forward_pre_hooks) == 0


def test_the_contract_of_torch_registers_sharded_modules() -> None:
    model = chain()
    assert "fully_shard" in (_get_registry(model[0]) or {})
    with pytest.raises(RuntimeError, match=r"Module already managed by `fully_shard`"):
        replicate(model)
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        torch_fsdp.fully_shard(model)


def test_dynamo_finds_its_marks_on_all_modules() -> None:
    for module in chain().modules():
        assert module._is_fsdp_managed_module is True
        assert module._fsdp_use_orig_params is True


def test_a_state_is_an_instance_of_torchs_class_and_inherits_nothing_from_it() -> None:
    """Torch's ``_get_module_fsdp_state`` finds states by this class."""
    model = chain()
    state = _get_module_state(model[0])
    assert isinstance(state, FSDPState)
    assert state is torch_state(model[0])
    assert type(state).__mro__ == (ClientState, object)
    assert _get_module_state(nn.Linear(2, 2)) is None


def assert_found(model: nn.Module) -> None:
    found = {name: state for name, module in model.named_modules() if (state := _get_module_fsdp_state(module))}
    assert set(found) == {"", "0", "1.0", "1.1"}
    assert all(state is torch_state(model.get_submodule(name)) for name, state in found.items())


def test_torchs_own_lookup_finds_the_states_of_all_modules_and_of_copies_and_keeps_none_alive() -> None:
    model = chain()
    for each in (model, copy.deepcopy(model)):
        assert_found(each)
    known = weakref.ref(model[0])
    del model, each
    gc.collect()
    assert known() is None
    assert all(isinstance(module, nn.Module) for module in _module_state_mapping)


def test_a_model_is_moved_to_the_host_between_rollouts() -> None:
    """The code follows VeOmni and verl."""
    model = chain()
    model(torch.ones(2, 3)).sum()  # the root stays unsharded
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if state is None or state._fsdp_param_group is None:
            continue
        state._fsdp_param_group._training_state = TrainingState.IDLE
    model.reshard()
    model.cpu()
    assert state_of(model[0]).group.parameter_state is ParameterState.SHARDED
    with pytest.raises(UnsupportedError, match="_training_state cannot be set to FORWARD here"):
        torch_state(model[0])._fsdp_param_group._training_state = TrainingState.FORWARD


def test_reshard_after_forward_can_be_set_through_mesh_infos() -> None:
    """The code follows verl's ``set_reshard_after_forward`` and DINOv3."""
    model = chain()
    for stays in (True, False, True):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state._auto_reshard_after_forward = False
                if group := state._fsdp_param_group:
                    group.post_forward_mesh_info = _get_post_forward_mesh_info(not stays, group.mesh_info)
        assert torch_state(model[0])._fsdp_param_group._reshard_after_forward is not stays
        model(torch.ones(2, 3)).sum().backward()
        assert state_of(model[0]).options.reshard.kind is (ReshardKind.NEVER if stays else ReshardKind.ALWAYS)

    root: Any = fully_shard(nn.Sequential(nn.Linear(3, 3)))
    group = root._get_fsdp_state()._fsdp_param_group
    root(torch.ones(2, 3)).sum()  # by default only the root's parameters stay unsharded
    root.reshard()
    assert not group._reshard_after_forward
    group.post_forward_mesh_info = group.mesh_info
    root(torch.ones(2, 3)).sum()
    assert state_of(root).group.parameter_state is ParameterState.SHARDED
    with pytest.raises(UnsupportedError, match="use set_reshard_after_forward"):
        root._get_fsdp_state()._auto_reshard_after_forward = True


def test_meshes_are_described_in_torchs_words() -> None:
    """The code follows torchtitan and verl."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(3, 2), mesh=mesh)
    info = torch_state(model)._fsdp_param_group.mesh_info
    assert isinstance(info, HSDPMeshInfo)
    assert (info.mesh, info.shard_mesh_size) == (mesh, 1)


def test_hooks_of_tensors_see_the_pass_for_which_they_gather() -> None:
    """Weights of TransformerEngine do this to send only the data that the pass needs."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    seen: list[tuple[int, bool, TrainingState]] = []

    def hang_on(index: int) -> None:
        local = model[index].weight._local_tensor

        def pre(mesh: Any) -> Any:
            group = _get_module_fsdp_state(model[index])._fsdp_param_group  # type: ignore[union-attr]
            assert group is not None
            seen.append((index, group._reshard_after_forward, group._training_state))
            return (local,), None

        local.fsdp_pre_all_gather = pre
        local.fsdp_post_all_gather = lambda outs, metadata, dtype, *, out=None: (outs[0], outs)

    for index in range(2):
        hang_on(index)
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    forward, backward = TrainingState.FORWARD, TrainingState.PRE_BACKWARD
    assert sorted(seen, key=str) == sorted([(i, True, s) for i in range(2) for s in (forward, backward)], key=str)
    seen.clear()
    model[0].unshard()
    assert seen == [(0, True, TrainingState.IDLE)]


def test_states_groups_and_parameters_show_policy_names_and_shapes() -> None:
    policy: Any = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for each in (*model, model):
        fully_shard(each, mp_policy=policy)
    model(torch.ones(1, 3))
    state = model[1]._get_fsdp_state()
    group = state._fsdp_param_group
    weight, bias = group.fsdp_params
    assert state._mp_policy == policy == group.mp_policy
    assert (group._module_fqn, weight._param_fqn, bias._param_fqn) == ("1", "weight", "bias")
    assert (weight._orig_dtype, weight._orig_size, bias.sharded_size) == (torch.float32, (2, 5), (2,))
    for view, name in ((group, "_module_fqn"), (state, "_mp_policy"), (weight, "_param_fqn")):
        text = (
            rf"^{name} of torch's FSDP2 cannot be set here\. Use the methods of the module: the table in docs/upstream"
        )
        with pytest.raises(MissingNameError, match=text):
            setattr(view, name, None)
    own = fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(grad_dtype=torch.float32))
    assert torch_state(own)._mp_policy.grad_dtype is torch.float32


def test_a_communication_context_is_one_object_for_the_roots_that_share_it() -> None:
    def contexts() -> list[Any]:
        return [each._get_fsdp_state()._comm_ctx for each in roots]

    roots: list[Any] = [fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)))) for _ in range(3)]
    one, two, three = contexts()
    assert len({id(one), id(two), id(three)}) == 3
    assert roots[0][0]._get_fsdp_state()._fsdp_param_group.comm_ctx is one
    share_comm_ctx(roots[:2])
    assert [each is one for each in contexts()] == [True, True, False]
    torch_fsdp.share_comm_ctx(roots[1:])  # torch's own function
    assert [each is one for each in contexts()] == [True, True, True]


def test_a_method_that_only_torchs_class_has_is_refused_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_fsdp.FSDPModule, "set_of_next_year", lambda self, value: None, raising=False)
    module: Any = fully_shard(type("Late", (nn.Linear,), {})(2, 2))
    text = rf"^set_of_next_year is a method of FSDPModule in torch {re.escape(torch.__version__)} that is not supported"
    with pytest.raises(MissingNameError, match=text):
        module.set_of_next_year(True)
    assert not hasattr(module, "set_of_next_year")


@pytest.mark.parametrize(
    ("place", "name"), [("State", "_a_mark_of_a_library"), ("ParamGroup", "finalize_backward"), ("Param", "to_sharded")]
)
def test_other_private_names_are_refused_with_a_remedy_also_when_they_are_set(place: str, name: str) -> None:
    model = fully_shard(nn.Linear(3, 3))
    state = torch_state(model)
    group = state._fsdp_param_group
    view = {"State": state, "ParamGroup": group, "Param": group.fsdp_params[0]}[place]
    text = f"^{name} of torch's FSDP2 does not exist here. Use the methods of the module: the table in docs/upstream"
    with pytest.raises(UnsupportedError, match=text):
        getattr(view, name)
    with pytest.raises(AttributeError, match=text):
        setattr(view, name, [])
    assert getattr(view, name, None) is None


def test_a_model_that_is_an_abstract_class_can_be_sharded() -> None:
    """The code follows verl, which gives torch's ``FSDPModule`` the metaclass of such models."""

    class Abstract(nn.Linear, abc.ABC):
        pass

    class AbstractFSDPModule(abc.ABC, torch_fsdp.FSDPModule):
        pass

    original, _fully_shard.FSDPModule = _fully_shard.FSDPModule, AbstractFSDPModule  # type: ignore[misc]
    try:
        model: Any = fully_shard(Abstract(3, 3))
    finally:
        _fully_shard.FSDPModule = original  # type: ignore[misc]
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), torch.full((3, 3), 2.0))


def test_torchs_fully_shard_around_ours_is_refused_when_it_begins() -> None:
    model = nn.Sequential(fully_shard(nn.Linear(3, 3)), nn.Linear(3, 3))
    torch_fsdp.fully_shard(model)
    with pytest.raises(UnsupportedError, match=r"Use one fully_shard for a whole model: torch's own.*patch_torch\(\)"):
        model(torch.ones(2, 3))


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


def test_modules_that_import_the_names_before_or_meanwhile_get_ours_and_then_torchs_back(client: ModuleType) -> None:
    imports(client, "from torch.distributed.fsdp import fully_shard, share_comm_ctx as share")
    with patch_torch():
        assert client.fully_shard.__wrapped__ is ours.fully_shard
        assert client.share.__wrapped__ is ours.share_comm_ctx
        imports(client, "from torch.distributed._composable.fsdp import fully_shard as meanwhile")
        imports(client, "from composable_fsdp import fully_shard as chosen")
    assert client.fully_shard is client.meanwhile is ORIGINAL[0]
    assert client.share is ORIGINAL[2]
    assert client.chosen is ours.fully_shard, "a direct import of the library is unchanged"
    assert current() == ORIGINAL


def test_the_classes_of_torch_stay_what_they_are() -> None:
    before = {name: getattr(torch_fsdp, name) for name in torch_fsdp.__all__}
    with patch_torch():
        changed = {name for name, value in before.items() if getattr(torch_fsdp, name) is not value}
    assert changed == {"fully_shard", "register_fsdp_forward_method", "share_comm_ctx"}


def test_patches_nest_and_the_last_one_undone_gives_the_names_back_also_after_an_exception() -> None:
    outer = patch_torch()
    with patch_torch():
        outer.undo()
        outer.undo()
        assert torch_fsdp.fully_shard is not ORIGINAL[0]
    assert current() == ORIGINAL
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
