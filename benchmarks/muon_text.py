"""Trains the demo's model on the demo's text by AdamW and by Muon, and draws both loss curves.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/muon_text.py --picture docs/muon.png

Model, text, batches, warm-up, clipping and weight decay are the same for both, and both are trained with each learning
rate; the picture shows the best run of each. Muon adjusts its learning rate to the size of AdamW's updates
(``adjust_lr_fn="match_rms_adamw"``), and gives the embedding, which is the head too, and the norms to AdamW.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from report import parser, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from text.data import load_corpus
from text.options import Options, options_from
from text.sharding import build_sharded_model, make_mesh
from text.training import History, Trainer

from composable_fsdp import Muon

WINDOW = 10
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.95)


def make_optimizer(name: str, model: torch.nn.Module, options: Options) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=options.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    others = [p for name, p in named if not name.startswith("blocks.") or p.ndim != 2]
    return Muon(
        [{"params": matrices}, {"params": others, "algorithm": "adamw", "betas": BETAS, "fused": True}],
        lr=options.lr,
        weight_decay=WEIGHT_DECAY,
        adjust_lr_fn="match_rms_adamw",
    )


def train(name: str, options: Options) -> tuple[History, float]:
    """Return the losses of all steps, and the loss on the validation text after them."""
    device = torch.device("cpu")
    corpus, mesh = load_corpus(seq=options.seq), make_mesh(options, device, dist.get_world_size())
    model = build_sharded_model(options, mesh, seed=options.seed)
    trainer = Trainer(model, make_optimizer(name, model, options), options, device)
    history = trainer.train(corpus.training, range(options.steps))
    return history, trainer.validate(corpus.validation)


def draw(losses: dict[str, list[float]], steps: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4))
    axes = figure.add_subplot()
    for name, values in losses.items():
        smooth = [mean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]
        axes.plot(range(1, steps + 1), smooth, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per byte (mean of {WINDOW} steps)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=160)
    command.add_argument("--lrs", default="0.001,0.003,0.01", help="learning rates to train with")
    command.add_argument("--picture", type=Path, default=None, help="the picture to write")
    arguments = command.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = 4 if arguments.quick else arguments.steps
    sizes = {"layers": 3, "dim": 128, "heads": 4, "hidden": 384, "seq": 96}
    rates = [0.003] if arguments.quick else [float(rate) for rate in arguments.lrs.split(",")]
    rows: list[dict[str, Any]] = []
    curves: dict[str, list[float]] = {}
    best: dict[str, float] = {}
    for name in ("AdamW", "Muon"):
        for lr in rates:
            options = options_from({"steps": steps, "lr": lr, "device": "cpu", **sizes})
            history, validation = train(name, options)
            marks = {f"loss at {at}": round(mean(history.losses[max(0, at - WINDOW) : at]), 4) for at in _marks(steps)}
            rows.append({"optimizer": name, "lr": lr, "validation loss": round(validation, 4), **marks})
            if validation < best.get(name, float("inf")):
                best[name] = validation
                label = f"{name}, lr {lr:g}: {validation:.3f} on the validation text"
                curves = {key: losses for key, losses in curves.items() if not key.startswith(name)}
                curves[label] = history.losses
    if dist.get_rank() == 0:
        settings = {"ranks": dist.get_world_size(), "steps": steps}
        publish("Muon on the demo's text", settings, list(rows[0]), rows, arguments.out)
        if arguments.picture is not None:
            draw(curves, steps, arguments.picture)
            print(f"written: {arguments.picture}")
    dist.barrier()
    dist.destroy_process_group()


def _marks(steps: int) -> list[int]:
    return sorted({steps // 4, steps // 2, steps})


if __name__ == "__main__":
    main()
