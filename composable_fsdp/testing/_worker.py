"""A worker of ``run_ranks``: a process that runs one function after another on the same gloo process group."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch
import torch.distributed as dist

from composable_fsdp._consistency.watchdog import known_watchdog
from composable_fsdp.testing._messages import Call, Job, Raised, Ready, Returned, apply_warning_filters

__all__ = ["main"]


def main(rank: int, world_size: int, port: int, descriptors: Sequence[int]) -> None:
    """Serve calls until the other end of the pipe is closed.

    Args:
        port: the port of the caller's ``TCPStore`` on the loopback address.
        descriptors: this end of the pipe, and the file for the Python stacks on ``SIGUSR1`` and on a crash.
    """
    pipe, dump = descriptors
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    # The handler is in C, so it also writes stacks while the main thread waits in a collective and holds the GIL.
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
    connection = Connection(pipe)
    calls: SimpleQueue[Call] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True, name="calls").start()

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    _reset()
    connection.send(Ready())
    for number in itertools.count():
        call = calls.get()
        _reset()
        _separate_store(store, number)
        connection.send(_run(call))


def _receive(connection: Connection, calls: SimpleQueue[Call]) -> None:
    """Receive calls in a thread, so that the worker ends with its caller even while a function hangs."""
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(os.getpid(), signal.SIGKILL)  # the worker's process group, including its children


def _reset() -> None:
    """Reset global state, so that every function starts alike.

    This happens before a call and not after one, because by then every rank has finished with the groups destroyed
    here.
    """
    made = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        _forget_meshes()
    watchdog = known_watchdog()
    if watchdog is not None:
        watchdog.go_on()  # other ranks would give the failure of an earlier call as the reason of a process' end
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    gc.collect()
    gc.freeze()  # the rest is modules and caches: torch's alone make a collection take 0.2 s


def _separate_store(store: dist.Store, number: int) -> None:
    """Give process groups of this call their own keys in the store.

    ``new_group(use_local_synchronization=True)`` names a group by its ranks and the number of existing groups. A group
    could otherwise have the name of an earlier call's group, read its stale address, and wait for it forever.
    """
    world = dist.group.WORLD
    assert world is not None
    groups = dist.distributed_c10d._world.pg_map
    groups[world] = (groups[world][0], dist.PrefixStore(f"call {number}", store))


def _forget_meshes() -> None:
    """Clear DTensor caches: they are keyed by *equal* meshes, and would return earlier meshes with destroyed groups.

    They also keep the threads of these groups alive: three for each, of which gloo's wakes 100 times per second.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _run(call: Call) -> Returned | Raised:
    try:
        sys.path[:] = call.path
        os.chdir(call.directory)
        importlib.invalidate_caches()
        job: Job = pickle.loads(call.job)
        with warnings.catch_warnings():
            apply_warning_filters(job.filters)
            result = job.function(*job.args, **job.kwargs)
        return Returned(_pickled(result), group_alive=dist.is_initialized())
    except BaseException as error:  # exit() and pytest.fail() must reach the caller too
        own_frame = error.__traceback__
        text = traceback.format_exception(type(error), error, own_frame and own_frame.tb_next)
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return Raised(first_line, "".join(text))


def _pickled(result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"The result, a {type(result).__qualname__}, cannot be sent to the caller of run_ranks: {error}"
        ) from error
