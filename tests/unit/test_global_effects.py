"""The library installs no global hooks at import, and later only the hooks that it needs."""

from __future__ import annotations

import pytest

from tests.helpers.fresh_process import run_program

EFFECTS = """
import atexit, os, signal, sys, threading
import torch, torch._dynamo, torch.distributed, torch.distributed.checkpoint, torch.distributed.tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

at_fork = []
os.register_at_fork = lambda **functions: at_fork.append(functions)


def effects():
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
    return {
        "exit functions": atexit._ncallbacks(),
        "excepthook": sys.excepthook,
        "threads": [thread.name for thread in threading.enumerate()],
        "signal handlers": handlers,
        "fork functions": len(at_fork),
        "optimizer hooks": len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks),
        "file descriptors": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "environment": dict(os.environ),
        "step": Optimizer.step,
        "backward": torch.Tensor.backward,
        "autograd engine": torch.autograd.Variable._execution_engine,
    }


def changes(before):
    return sorted(name for name, value in effects().items() if value != before[name])


begin = effects()
"""
IMPORT = """
import composable_fsdp, composable_fsdp.checkpoint, composable_fsdp.codecs, composable_fsdp.diagnostics
import composable_fsdp.interop, composable_fsdp.optim, composable_fsdp.wrap
"""
SHARD = """
import composable_fsdp
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
begin = effects()
model = composable_fsdp.fully_shard(torch.nn.Linear(2, 2))
"""


def run(program: str) -> str:
    done = run_program(f"{EFFECTS}\n{program}\nprint(changes(begin))")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.multiprocess
@pytest.mark.behaviour("A-01")
def test_an_import_installs_nothing() -> None:
    assert run(IMPORT) == "[]"


@pytest.mark.multiprocess
@pytest.mark.behaviour("A-01")
def test_a_sharded_module_on_one_rank_installs_optimizer_hooks_and_error_explanations() -> None:
    """With one rank, no thread starts and no functions are registered for exit or fork."""
    assert run(SHARD) == "['excepthook', 'optimizer hooks']"


LIFETIME = f"""
import copy
{SHARD}


def another():
    made = composable_fsdp.fully_shard(torch.nn.Linear(2, 2))
    made(torch.ones(1, 2))
    return made


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
other = another()
del optimizer, model
print("one of two models is left:", changes(begin))
del other
print("none is left:", changes(begin))
model = another()
print("the next one:", changes(begin))
clone = copy.deepcopy(model)
del model
print("its copy:", changes(begin))
del clone
print("no copy:", changes(begin))
"""
DROPPED_IN_A_STEP = """
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
models = [composable_fsdp.fully_shard(torch.nn.Linear(2, 2))]


class Groups(list):
    def __iter__(self):
        models.clear()
        return super().__iter__()


optimizer.param_groups = Groups(optimizer.param_groups)
optimizer.step()
optimizer.param_groups = list(optimizer.param_groups)
assert not models
print("dropped in a step:", changes(begin))
"""
OTHER_EXCEPTHOOK = """
model = another()
sys.excepthook = theirs = lambda *_: None
del model
assert sys.excepthook is theirs
print("another excepthook:", changes(begin))
"""


@pytest.mark.multiprocess
@pytest.mark.behaviour("A-01")
def test_global_hooks_live_as_long_as_sharded_models_and_their_copies() -> None:
    """A model may be freed while its optimizer's hooks run. An excepthook installed after ours is kept."""
    assert run(f"{LIFETIME}{DROPPED_IN_A_STEP}{OTHER_EXCEPTHOOK}").splitlines() == [
        "one of two models is left: ['autograd engine', 'excepthook', 'optimizer hooks']",
        "none is left: []",
        "the next one: ['autograd engine', 'excepthook', 'optimizer hooks']",
        "its copy: ['excepthook', 'optimizer hooks']",
        "no copy: []",
        "dropped in a step: ['optimizer hooks']",
        "another excepthook: ['excepthook']",
        "['excepthook']",
    ]
