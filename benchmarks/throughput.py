"""tokens/s of `hpcrun train` against a plain torch loop of the same model, started by torchrun.

The plain loop is what one writes first: DDP or FSDP2, AdamW, clip, one print a step. Same model code, same
attention, same optimizer, same threads, two ranks. Runs alternate; each pair gives one ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import harness

from hpcrun.formulas import median_interval

RANKS, SEQ_LEN, MBS, GRAD_ACCUM, WARM = 2, 256, 4, 1, 4
MODEL: dict[str, Any] = {"vocab": 256, "hidden": 256, "ffn": 768, "layers": 4, "heads": 8, "kv_heads": 4}
MODES = {
    "ddp": ("parallel.dp_replicate=2",),
    "fsdp2": ("parallel.dp_shard=2", "parallel.zero=3"),
}


def plain_loop(mode: str, steps: int, out: Path) -> None:
    """The obvious loop; runs under torchrun and writes its step times."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hpcrun.runtime.model import Decoder, initialise_parameters, loss_function
    from hpcrun.specs.model import ModelSpec

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    tokens = np.frombuffer(b"".join(path.read_bytes() for path in corpus()), dtype=np.uint8)
    spec = ModelSpec(**MODEL, head_dim=MODEL["hidden"] // MODEL["heads"])
    decoder = Decoder(spec)
    initialise_parameters(decoder, spec, seed=0)
    model: torch.nn.Module = decoder
    if mode == "ddp":
        model = DistributedDataParallel(decoder)
    else:
        for block in decoder.layers.values():
            fully_shard(block)
        fully_shard(decoder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = np.random.default_rng(rank)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        starts = random.integers(0, len(tokens) - SEQ_LEN - 1, MBS * GRAD_ACCUM)
        rows = torch.from_numpy(np.stack([tokens[s : s + SEQ_LEN + 1] for s in starts]).astype(np.int64))
        optimizer.zero_grad()
        loss = loss_function(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(loss.item(), flush=True)
        times.append(time.perf_counter() - begin)
    if rank == 0:
        out.write_text(json.dumps(times[WARM:]))
    dist.barrier()
    assert world == RANKS
    dist.destroy_process_group()


def corpus() -> list[Path]:
    """The text of both sides: a handful of the standard library's files."""
    return sorted(Path(os.__file__).parent.glob("[a-f]*.py"))


def run_plain(mode: str, steps: int, folder: Path) -> list[float]:
    """Step times of one run of the plain loop."""
    out = folder / "plain.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [*torchrun, __file__, "--plain", mode, "--steps", str(steps), "--out", str(out)]
    _run(command, os.environ | {"OMP_NUM_THREADS": "1"})
    times: list[float] = json.loads(out.read_text())
    return times


def run_hpcrun(mode: str, steps: int, folder: Path) -> list[float]:
    """Step times of one run of the product, as its own metrics tell them."""
    root = folder / "runs"
    job = folder / "job.yaml"
    model = ", ".join(f"{key}: {value}" for key, value in MODEL.items())
    text = folder / "text"
    if not text.exists():
        text.mkdir()
        for path in corpus():
            (text / path.name).write_bytes(path.read_bytes())
    job.write_text(
        f"name: throughput\nmodel: {{{model}}}\n"
        f"data: {{text: {text}, seq_len: {SEQ_LEN}, holdout: 0.0}}\n"
        f"train: {{steps: {steps}, mbs: {MBS}, gbs: {MBS * GRAD_ACCUM * RANKS}, lr: 3e-4}}\n"
        "checkpoint: {at_end: false}\ndevice: cpu\n"
    )
    command = [sys.executable, "-m", "hpcrun", "train", str(job), *MODES[mode]]
    _run(command, os.environ | {"OMP_NUM_THREADS": "1", "HPCRUN_ROOT": str(root)})
    newest = max(root.iterdir(), key=lambda path: path.stat().st_mtime)
    lines = [json.loads(line) for line in (newest / "metrics.jsonl").read_text().splitlines()]
    return [line["step_time_s"] for line in lines if line["kind"] == "step"][WARM:]


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ended with {done.returncode}: {done.stderr[-2000:]}")


def measure(report: harness.Report, mode: str, pairs: int, steps: int) -> None:
    """Alternate the two sides and turn each pair into one ratio."""
    ratios: list[float] = []
    per_step: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pair in range(pairs):
            sides = {"plain": run_plain, "hpcrun": run_hpcrun}
            order = ("plain", "hpcrun") if pair % 2 == 0 else ("hpcrun", "plain")
            for side in order:
                per_step[side] = statistics.median(sides[side](mode, steps, folder))
            tokens = MBS * GRAD_ACCUM * RANKS * SEQ_LEN
            ratios.append(per_step["plain"] / per_step["hpcrun"])
            report.row(
                against=mode,
                pair=pair + 1,
                plain_tokens_per_s=round(tokens / per_step["plain"]),
                hpcrun_tokens_per_s=round(tokens / per_step["hpcrun"]),
                ratio=ratios[-1],
            )
    low, high = median_interval(ratios)
    figure = f"{harness.spread(ratios)}, 95 % interval of the median [{low:.3f}, {high:.3f}], n = {pairs}"
    median = statistics.median(ratios)
    report.claim(f"tokens/s of hpcrun over plain {mode}", figure, "at least 0.97", median >= 0.97)


def main() -> int:
    """Print the table and one line a claim."""
    parser = harness.options(__doc__)
    parser.add_argument("--pairs", type=int, help="pairs of runs a comparison; default 9, quick 2")
    parser.add_argument("--plain", help=SUPPRESS)
    parser.add_argument("--steps", type=int, help="steps a run; default 40, quick 16")
    parser.add_argument("--out", type=Path, help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        plain_loop(arguments.plain, arguments.steps, arguments.out)
        return 0
    report = harness.Report("throughput")
    report.header()
    pairs = arguments.pairs or (2 if arguments.quick else 9)
    steps = arguments.steps or (16 if arguments.quick else 40)
    for mode in MODES:
        try:
            measure(report, mode, pairs, steps)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return harness.fail(str(error))
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
