"""Runs every benchmark in sequence with a timeout, then makes ``RESULTS.md`` and the docs' charts from their output.

    python benchmarks/run_all.py           # into benchmarks/results, which takes hours on two idle cores
    python benchmarks/run_all.py --quick   # into runs/bench-quick, to check that everything runs

If a benchmark fails or takes too long, the others still run, and it is named at the end.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOCKETS = {"COMPOSABLE_FSDP_SHARED_MEMORY": "0"}
LOCAL = "--local-optimizer"
FUSED = "--local-optimizer --optimizer adamw-fused"


@dataclass(frozen=True)
class Benchmark:
    """A script with its arguments.

    Attributes:
        name: the name of the file that it writes.
        ranks: the number of processes that torchrun starts; 0 if the script starts them.
        minutes: the timeout.
    """

    name: str
    script: str
    ranks: int = 0
    minutes: float = 15
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, out: Path, *, quick: bool) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        script, *options = shlex.split(self.script)
        launcher = [sys.executable, *(torchrun if self.ranks else [])]
        return [*launcher, f"benchmarks/{script}", *options, *(["--quick"] if quick else []), "--out", str(out)]

    def run(self, out: Path, *, quick: bool) -> str | None:
        """Run the benchmark, and return its problem or None."""
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | os.environ | self.environment
        # A process group for the script, so that a timeout also ends its ranks.
        process = subprocess.Popen(self.command(out, quick=quick), cwd=ROOT, env=environment, start_new_session=True)
        try:
            status = process.wait(self.minutes * 60)
        except subprocess.TimeoutExpired:
            return f"not done after {self.minutes:.0f} minutes"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return f"exit status {status}" if status else None


BENCHMARKS = [
    Benchmark("memory", "memory.py"),
    Benchmark("reserved-memory", "reserved_memory.py"),
    Benchmark("construction", "construction.py"),
    Benchmark("describe", "describe.py"),
    Benchmark("exposure", "exposure.py"),
    Benchmark("offload-order", "offload_order.py"),
    Benchmark("schedule-sweep", "schedule_sweep.py"),
    Benchmark("host-overhead", "host_overhead.py"),
    Benchmark("growth", "growth.py"),
    Benchmark("host-overhead-alone", "host_overhead.py --alone"),
    Benchmark("optimizer-step", "optimizer_step.py"),
    Benchmark("resident", "resident.py"),
    Benchmark("load-memory", "load_memory.py"),
    *(
        benchmark
        for ranks in (2, 4)
        for benchmark in (
            Benchmark(f"step-time-{ranks}", "step_time.py", ranks, 30),
            Benchmark(f"step-time-{ranks}-sgd", "step_time.py --optimizer sgd", ranks, 30),
            Benchmark(f"step-time-{ranks}-local", f"step_time.py {LOCAL}", ranks, 30),
            Benchmark(f"step-time-{ranks}-fused", f"step_time.py {FUSED}", ranks, 30),
            Benchmark(f"step-time-{ranks}-bf16", f"step_time.py --bf16 {LOCAL}", ranks, 30),
            Benchmark(f"step-time-{ranks}-bf16-fused", f"step_time.py --bf16 {FUSED}", ranks, 30),
            Benchmark(f"step-time-{ranks}-sockets", f"step_time.py {LOCAL}", ranks, 30, SOCKETS),
            Benchmark(f"step-time-{ranks}-sockets-fused", f"step_time.py {FUSED}", ranks, 30, SOCKETS),
            Benchmark(f"step-parts-{ranks}", "step_parts.py --local-optimizer", ranks),
            Benchmark(f"step-parts-{ranks}-sgd", "step_parts.py --optimizer sgd", ranks),
            Benchmark(f"step-parts-{ranks}-sockets", "step_parts.py --local-optimizer", ranks, environment=SOCKETS),
            Benchmark(f"order-check-{ranks}", "order_check.py", ranks),
            Benchmark(f"order-check-{ranks}-sockets", "order_check.py", ranks, environment=SOCKETS),
            Benchmark(f"version-check-{ranks}", "version_check.py", ranks),
            Benchmark(f"group-transfers-{ranks}", "group_transfers.py", ranks),
            Benchmark(f"group-transfers-{ranks}-sockets", "group_transfers.py", ranks, environment=SOCKETS),
            Benchmark(f"group-transfers-{ranks}-alone", "group_transfers.py --alone", ranks),
            Benchmark(f"gloo-transfers-{ranks}", "gloo_transfers.py", ranks),
            Benchmark(f"collectives-{ranks}", "collectives.py", ranks),
            Benchmark(f"checkpoint-{ranks}", "checkpoint.py", ranks),
            Benchmark(f"weight-stream-{ranks}", "weight_stream.py", ranks),
            Benchmark(f"muon-{ranks}", "muon.py", ranks),
        )
    ),
    Benchmark("bucket-sweep", "bucket_sweep.py"),
    Benchmark("muon-text", "muon_text.py", 2, 30),
    Benchmark("network", "network.py", minutes=30),
    Benchmark("plan-accuracy", "plan_accuracy.py"),
    Benchmark("plan-large", "plan_accuracy.py --large"),
    Benchmark("plan-resident", "plan_resident.py"),
    Benchmark("plan-order", "plan_order.py"),
    Benchmark("soak", "soak.py", minutes=60),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small forms of all, kept out of the results")
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    arguments = parser.parse_args()
    folder = Path("runs/bench-quick" if arguments.quick else "benchmarks/results")
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in arguments.only.split(",")]
    problems = {}
    for benchmark in chosen:
        print(f"\n=== {benchmark.name}", flush=True)
        out = folder / f"{datetime.date.today()}-{benchmark.name}.json"
        problem = benchmark.run(out, quick=arguments.quick)
        if problem:
            problems[benchmark.name] = problem
    page = folder / "RESULTS.md" if arguments.quick else Path("benchmarks/RESULTS.md")
    tables = [sys.executable, "benchmarks/results_table.py", "--results", str(folder), "--out", str(page)]
    subprocess.run(tables, cwd=ROOT, check=True)
    if not arguments.quick:
        subprocess.run([sys.executable, "benchmarks/charts.py"], cwd=ROOT, check=True)
    for name, problem in problems.items():
        print(f"{name} failed: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
