"""``examples/launch/torchrun.sh`` on two hosts: two network namespaces, with two ranks in each."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.forked_python import forked_python
from tests.helpers.torchrun import ROOT

NETWORK = "10.88.9"
LACKING = [
    name
    for name, is_there in {
        "root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "ip (iproute2)": shutil.which("ip") is not None,
        "unshare (util-linux)": shutil.which("unshare") is not None,
    }.items()
    if not is_there
]
PROBE = ["unshare", "--net", "--uts", "--mount", "sh", "-c", "ip link add v0 type veth peer name v1"]
if not LACKING and subprocess.run(PROBE, capture_output=True).returncode:
    LACKING.append("the right to make them, which root has not in some containers")
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && shift && exec "$@"'
"""Gives a host its name, the names of others, and shared memory of its own."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Return what to put before a command to run it on the first and on the second host, ``host1`` and ``host2``."""
    names = [f"cf{os.getpid()}h{index}" for index in (1, 2)]
    table = tmp_path / "hosts"
    table.write_text(f"127.0.0.1 localhost\n{NETWORK}.1 host1\n{NETWORK}.2 host2\n")
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for index, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"{NETWORK}.{index}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield [
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", ENTER, f"host{index}", str(table)]
            for index, name in enumerate(names, 1)
        ]


@pytest.mark.skipif(bool(LACKING), reason=f"network namespaces need {', '.join(LACKING)}")
@pytest.mark.behaviour("H-05")
def test_two_hosts_continue_from_a_checkpoint_after_a_rank_has_raised(hosts: list[list[str]], tmp_path: Path) -> None:
    steps = ["--steps", "8", "--save-every", "3", "--fail-at", "4", "--fail-rank", "3"]
    command = ["examples/launch/torchrun.sh", "examples/launch/train.py", "--out", str(tmp_path / "saved"), *steps]
    settings = {"DOCTOR": "no", "HEAD": "host1", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = []
        for number, enter in enumerate(hosts, 1):
            (folder := tmp_path / f"host{number}").mkdir()
            python = stack.enter_context(forked_python(folder, enter))
            processes.append(
                subprocess.Popen(
                    [*enter, *command],
                    cwd=ROOT,
                    env={**os.environ, **settings, **python},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        try:
            first, second = (process.communicate(timeout=100)[0] for process in processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
    assert [process.returncode for process in processes] == [0, 0], first + second
    assert "4 ranks begin after step 0\n" in first
    assert re.search(r"failed \(exitcode: 1\) local_rank: 1 ", second), second  # rank 3, which raised
    assert re.search(r"4 ranks begin after step 3\ndone: 8 steps, loss 0\.\d+", first), first
