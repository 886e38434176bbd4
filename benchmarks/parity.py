"""Does every layout compute what one process computes? Losses and gradients, side by side.

Each layout trains a small model on the same data from the same seed; the reference is the whole model in one
process, written the obvious way. float64 shows mistakes of scale that float32 hides.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import SUPPRESS
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrun.runtime.control import Control
    from hpcrun.runtime.sharded_model import ShardedModel
    from hpcrun.specs.load import ResolvedJob

FEWER = (18, 2)
"""Sequences of a step and of a microbatch: nine of these, which three replicas share evenly, two do not."""
SEQ_LEN, GBS, MODEL = 32, 16, {"vocab": 256, "hidden": 64, "ffn": 96, "layers": 4, "heads": 4, "kv_heads": 2}


MODELS = {
    "plain": (),
    "tied": ("model.tied=true",),
    "deep": ("model.layers=8",),
    "uneven": ("model.hidden=30", "model.head_dim=16", "model.ffn=41", "model.vocab=257"),
}
"""What a layout trains: among others sizes that four shards do not divide, and layers for eight stages."""


@dataclass(frozen=True)
class Layout:
    """One line of the table: its name, its degrees, and which model it trains."""

    name: str
    ranks: int
    degrees: tuple[str, ...] = ()
    model: str = "plain"
    batch: tuple[int, int] | None = None
    """Its gbs and mbs, where not as usual."""
    replicas: int | None = None
    """With how few replicas it goes on; `ranks` is then what these take."""
    masked: bool = False
    """Whether some targets count for nothing."""

    @property
    def reference(self) -> tuple[str, int, bool]:
        """What the one process has to compute: which model, on how many sequences, masked or not."""
        return self.model, self.batch[0] if self.batch else GBS, self.masked


LAYOUTS = (
    Layout("1", 1),
    Layout("1, recompute full", 1, ("train.recompute=full",)),
    Layout("1, recompute selective", 1, ("train.recompute=selective",)),
    Layout("1, tied", 1, (), "tied"),
    Layout("dp_replicate 2", 2, ("parallel.dp_replicate=2",)),
    Layout("dp_shard 2, ZeRO 1", 2, ("parallel.dp_shard=2", "parallel.zero=1")),
    Layout("dp_shard 2, ZeRO 2", 2, ("parallel.dp_shard=2", "parallel.zero=2")),
    Layout("dp_shard 2, ZeRO 3", 2, ("parallel.dp_shard=2", "parallel.zero=3")),
    Layout("dp_shard 2, ZeRO 3, tied", 2, ("parallel.dp_shard=2",), "tied"),
    Layout("tp 2", 2, ("parallel.tp=2",)),
    Layout("tp 2, recompute full", 2, ("parallel.tp=2", "train.recompute=full")),
    Layout("tp 2, tied", 2, ("parallel.tp=2",), "tied"),
    Layout("pp 2, gpipe", 2, ("parallel.pp=2", "parallel.schedule=gpipe")),
    Layout("pp 2, 1f1b", 2, ("parallel.pp=2", "parallel.schedule=1f1b")),
    Layout("pp 2, interleaved", 2, ("parallel.pp=2", "parallel.schedule=interleaved")),
    Layout("pp 2, zero_bubble", 2, ("parallel.pp=2", "parallel.schedule=zero_bubble")),
    Layout("pp 2, 1f1b, recompute selective", 2, ("parallel.pp=2", "train.recompute=selective")),
    Layout("pp 2, 1f1b, tied", 2, ("parallel.pp=2",), "tied"),
    Layout(
        "pp 2, zero_bubble, tied",
        2,
        ("parallel.pp=2", "parallel.schedule=zero_bubble"),
        "tied",
    ),
    Layout("HSDP 2 × 2, ZeRO 3", 4, ("parallel.dp_replicate=2", "parallel.dp_shard=2")),
    Layout("HSDP 2 × 2, ZeRO 2", 4, ("parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.zero=2")),
    Layout("tp 2 · pp 2", 4, ("parallel.tp=2", "parallel.pp=2")),
    Layout("dp_shard 2 · tp 2", 4, ("parallel.dp_shard=2", "parallel.tp=2")),
    Layout("dp_shard 2 · pp 2, ZeRO 1", 4, ("parallel.dp_shard=2", "parallel.pp=2")),
    Layout("dp_shard 2 · pp 2, ZeRO 3", 4, ("parallel.dp_shard=2", "parallel.pp=2", "parallel.zero=3")),
    Layout(
        "dp_shard 2 · pp 2, ZeRO 2, interleaved",
        4,
        ("parallel.dp_shard=2", "parallel.pp=2", "parallel.zero=2", "parallel.schedule=interleaved"),
    ),
    Layout("dp_shard 4, ZeRO 3, uneven sizes", 4, ("parallel.dp_shard=4",), "uneven"),
    Layout("pp 4, interleaved, 8 layers", 4, ("parallel.pp=4", "parallel.schedule=interleaved"), "deep"),
    Layout("pp 4, zero_bubble, 8 layers", 4, ("parallel.pp=4", "parallel.schedule=zero_bubble"), "deep"),
    Layout("dp_shard 2 · tp 2 · pp 2", 8, ("parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2")),
    Layout(
        "dp_replicate 2 · tp 2 · pp 2, tied",
        8,
        ("parallel.dp_replicate=2", "parallel.tp=2", "parallel.pp=2"),
        "tied",
    ),
    Layout("dp_replicate 3, 2 left", 2, ("parallel.dp_replicate=3",), batch=FEWER, replicas=2),
    Layout("dp_shard 3, 2 left, ZeRO 1", 2, ("parallel.dp_shard=3", "parallel.zero=1"), "plain", FEWER, 2),
    Layout(
        "dp_shard 3, 2 left, ZeRO 2, tied", 2, ("parallel.dp_shard=3", "parallel.zero=2"), "tied", FEWER, 2
    ),
    Layout("dp_shard 3, 2 left, ZeRO 3", 2, ("parallel.dp_shard=3",), "plain", FEWER, 2),
    Layout("dp_shard 3, 2 left, masked targets", 2, ("parallel.dp_shard=3",), "plain", FEWER, 2, masked=True),
    Layout(
        "HSDP 3 × 2, 2 × 2 left", 4, ("parallel.dp_replicate=3", "parallel.dp_shard=2"), "plain", (18, 1), 4
    ),
    Layout(
        "dp_shard 3 · pp 2, 2 left, ZeRO 2",
        4,
        ("parallel.dp_shard=3", "parallel.pp=2", "parallel.zero=2"),
        batch=FEWER,
        replicas=2,
    ),
    # Nine microbatches are five rounds for two replicas, which interleaved makes six.
    Layout(
        "dp_replicate 3 · pp 2, 2 left, interleaved, masked targets",
        4,
        ("parallel.dp_replicate=3", "parallel.pp=2", "parallel.schedule=interleaved"),
        batch=FEWER,
        replicas=2,
        masked=True,
    ),
    Layout(
        "dp_replicate 3 · pp 2, 2 left, zero_bubble, tied",
        4,
        ("parallel.dp_replicate=3", "parallel.pp=2", "parallel.schedule=zero_bubble"),
        "tied",
        FEWER,
        2,
    ),
    Layout("dp_shard 3 · tp 2, 2 left", 4, ("parallel.dp_shard=3", "parallel.tp=2"), "plain", FEWER, 2),
)


def job(layout: Layout, precision: str, steps: int) -> ResolvedJob:
    """The job of one layout: the same data, seed and batch for all."""
    from hpcrun.specs.load import parse_job
    from hpcrun.specs.yaml import render_yaml

    gbs, mbs = layout.batch or (GBS, 2 if layout.ranks < 4 else 1)
    values = {
        "name": "parity",
        "model": MODEL,
        "data": {"text": str(Path(__file__).resolve()), "seq_len": SEQ_LEN, "holdout": 0.0},
        "train": {
            "steps": steps,
            "mbs": mbs,
            "gbs": gbs,
            "lr": 0.003,
            "warmup": 2,
            # Low enough to bite at every step: a wrong clip must change every later loss.
            "grad_clip": 0.5,
            "precision": precision,
            "seed": 7,
        },
    }
    return parse_job(render_yaml(values), layout.name, (*MODELS[layout.model], *layout.degrees))


def rank_main(ranks: int, precision: str, steps: int, out: Path, only: str) -> None:
    """Inside the world: train every layout of this size and write what came out."""
    import torch

    from hpcrun.launcher_world import detect_world
    from hpcrun.runtime import rank as entry
    from hpcrun.runtime.connect import connect_ranks
    from hpcrun.runtime.device import choose_device

    control = connect_ranks(detect_world(os.environ))
    device = choose_device("cpu", control)
    entry.prepare_torch(0, control)
    entry.open_process_groups(control, device)
    for index, layout in enumerate(LAYOUTS):
        if layout.ranks == ranks and only in layout.name:
            result = train_layout(layout, job(layout, precision, steps), control)
            torch.save(result, out / f"{index}.{control.rank}.pt")
    control.barrier()


def mask(layout: Layout, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The batch, of a masked layout without every target that follows one of some tokens."""
    from hpcrun.runtime.data_loader import IGNORED_TARGET

    if not layout.masked:
        return inputs, targets
    return inputs, targets.masked_fill((inputs % 7 == 4) | (inputs == 32), IGNORED_TARGET)


def train_layout(layout: Layout, resolved: ResolvedJob, control: Control) -> dict[str, Any]:
    """Losses and norms of all steps; whole gradients of the first and last, as far as this rank has them."""
    from hpcrun.data.corpus import inspect_corpus
    from hpcrun.runtime.data_loader import Batches, TokenSource
    from hpcrun.runtime.device import choose_device
    from hpcrun.runtime.optimizer import learning_rate
    from hpcrun.runtime.sharded_model import ShardedModel, sum_over_ranks
    from hpcrun.specs.reduced_plan import plan_with_replicas

    spec, plan = resolved.spec, resolved.training_plan
    if layout.replicas is not None:
        plan = plan_with_replicas(spec, plan, layout.replicas)
    assert spec.model is not None
    assert spec.data is not None
    model = ShardedModel(spec.model, plan, spec.train, choose_device("cpu", control), control.rank)
    losses, norms = [], []
    gradients: list[dict[str, Tensor]] = []
    with Batches(
        TokenSource(spec.data, inspect_corpus(spec.data)),
        seq_len=plan.seq_len,
        seed=spec.train.seed,
        gbs=plan.gbs,
        mbs=plan.mbs,
        dp_rank=model.mesh.dp_rank,
        dp_size=plan.degrees.dp,
        rounds=plan.grad_accum if plan.is_uneven else None,
    ) as batches:
        for step in range(1, spec.train.steps + 1):
            share = model.forward_backward(*mask(layout, *next(batches)))
            loss, norm, _ = model.totals(share)
            losses.append(loss)
            norms.append(norm)
            if step in (1, spec.train.steps):
                gradients.append(whole_gradients(model))
            model.optimizer.step(learning_rate(spec.train, plan.gbs, step), norm)
        share = model.evaluate(*mask(layout, *next(batches)))
        evaluated, _ = sum_over_ranks([share] * 2, model.device.torch_device)
    return {"losses": losses, "norms": norms, "gradients": gradients, "eval": evaluated}


def whole_gradients(model: ShardedModel) -> dict[str, Tensor]:
    """The gradients of this rank's stages, put together over the other axes."""
    from torch.distributed.tensor import DTensor

    gradients = {}
    for parameter, piece in zip(model.optimizer.parameters, model.optimizer.pieces, strict=True):
        assert piece.grad is not None
        whole = parameter.as_global(piece.grad)
        gradients[parameter.name] = (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()
    return gradients


def train_plainly(layout: Layout, resolved: ResolvedJob) -> dict[str, Any]:
    """The reference: whole model and batch in one process, torch's own clip, no parallel code of ours."""
    import torch

    from hpcrun.data.corpus import inspect_corpus
    from hpcrun.runtime.data_loader import Batches, TokenSource
    from hpcrun.runtime.model import Decoder, initialise_parameters, loss_function
    from hpcrun.runtime.optimizer import learning_rate

    spec, plan = resolved.spec, resolved.training_plan
    assert spec.model is not None
    assert spec.data is not None
    torch.set_num_threads(1)
    model = Decoder(spec.model).to(torch.float64 if spec.train.precision == "fp64" else torch.float32)
    initialise_parameters(model, spec.model, spec.train.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": spec.train.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=spec.train.eps)
    losses, norms = [], []
    gradients: list[dict[str, Tensor]] = []
    with Batches(
        TokenSource(spec.data, inspect_corpus(spec.data)),
        seq_len=plan.seq_len,
        seed=spec.train.seed,
        gbs=plan.gbs,
        mbs=plan.gbs,
        dp_rank=0,
        dp_size=1,
    ) as batches:
        for step in range(1, spec.train.steps + 1):
            inputs, targets = mask(layout, *next(batches))
            optimizer.zero_grad()
            loss = loss_function(model(inputs[0]), targets[0])
            loss.backward()  # type: ignore[no-untyped-call]
            if step in (1, spec.train.steps):
                named = model.named_parameters()
                gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
            assert spec.train.grad_clip is not None
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.train.grad_clip))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(spec.train, plan.gbs, step)
            optimizer.step()
            losses.append(float(loss.detach()))
            norms.append(norm)
        inputs, targets = mask(layout, *next(batches))
        with torch.no_grad():
            evaluated = float(loss_function(model(inputs[0]), targets[0]))
    return {"losses": losses, "norms": norms, "gradients": gradients, "eval": evaluated}


def launch(ranks: int, precision: str, steps: int, out: Path, only: str) -> None:
    """Start one world for all layouts of its size."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command = [str(mpiexec), "-launcher", "fork", "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__]
    options = ["--rank-of", str(ranks), "--precision", precision, "--steps", str(steps), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, *options, "--only", only], check=True, env=environment, timeout=900)


def compare(
    precision: str, steps: int, only: str = "", sizes: tuple[int, ...] = (1, 2, 4, 8)
) -> list[dict[str, Any]]:
    """Run every layout and measure its distance from the reference."""
    import torch

    references = {}
    for model, gbs, masked in {layout.reference for layout in LAYOUTS if only in layout.name}:
        one = Layout(model, 1, model=model, batch=(gbs, gbs), masked=masked)
        references[one.reference] = train_plainly(one, job(one, precision, steps))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sizes:
            if any(layout.ranks == ranks and only in layout.name for layout in LAYOUTS):
                launch(ranks, precision, steps, Path(folder), only)
        for index, layout in enumerate(LAYOUTS):
            if layout.ranks not in sizes or only not in layout.name:
                continue
            parts = [torch.load(Path(folder) / f"{index}.{rank}.pt") for rank in range(layout.ranks)]
            rows.append({"layout": layout.name, **distance(parts, references[layout.reference])})
    return rows


def distance(parts: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """Largest differences; every rank's view counts, and every gradient must be there."""
    worst = 0.0
    for when, expected in enumerate(reference["gradients"]):
        seen = set()
        for part in parts:
            for name, gradient in part["gradients"][when].items():
                seen.add(name)
                worst = max(worst, float((gradient - expected[name]).abs().max()))
        assert seen == expected.keys(), "some gradients are missing"
    pairs = [pair for part in parts for pair in zip(part["losses"], reference["losses"], strict=True)]
    norms = [pair for part in parts for pair in zip(part["norms"], reference["norms"], strict=True)]
    return {
        "loss": max(abs(a - b) for a, b in pairs),
        "loss_relative": max(abs(a - b) / b for a, b in pairs),
        "norm_relative": max(abs(a - b) / b for a, b in norms),
        "gradient": worst,
        "eval": max(abs(part["eval"] - reference["eval"]) for part in parts),
    }


def main() -> int:
    """Print the table and one line a claim."""
    parser = harness.options(__doc__)
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--rank-of", type=int, help=SUPPRESS)
    parser.add_argument("--precision", help=SUPPRESS)
    parser.add_argument("--steps", type=int, help=SUPPRESS)
    parser.add_argument("--out", type=Path, help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of, arguments.precision, arguments.steps, arguments.out, arguments.only)
        return 0
    report = harness.Report("parity")
    report.header()
    sizes = (1, 2) if arguments.quick else (1, 2, 4, 8)
    try:
        double = measure(report, "fp64", 3, arguments.only, sizes)
        single = [] if arguments.quick else measure(report, "fp32", 20, arguments.only, sizes)
    except (subprocess.SubprocessError, OSError) as error:
        return harness.fail(str(error))
    worst = max(max(row["loss"], row["gradient"], row["eval"]) for row in double)
    what = f"{len(double)} layouts against one process"
    report.claim(f"float64 loss and gradients of {what}, largest difference", worst, "1e-12", worst <= 1e-12)
    if single:
        worst = max(row["loss_relative"] for row in single)
        report.claim(f"float32 loss over 20 steps of {what}, relative", worst, "1e-5", worst <= 1e-5)
    report.write(arguments.json)
    return 0


def measure(
    report: harness.Report, precision: str, steps: int, only: str, sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Compare in one precision and print the rows."""
    rows = compare(precision, steps, only, sizes)
    for row in rows:
        report.row(precision=precision, steps=steps, **row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
