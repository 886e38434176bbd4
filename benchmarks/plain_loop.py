"""What one writes without us: a torch loop that saves now and then and goes on from its save, on gloo.

Started by srun or torchrun; writes a line a step to FOLDER/steps.jsonl. Also run by recovery.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SAVE_EVERY = 5


def main(folder: Path, steps: int) -> None:
    """Train a small model with DDP, from the newest save on."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    for name, source in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        os.environ.setdefault(name, os.environ.get(source, ""))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters())
    save, first = folder / "save.pt", 1
    if save.exists():
        state = torch.load(save)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(0.1)
        if rank == 0:
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"time": time.time(), "step": step, "pid": os.getpid()}) + "\n")
            if step % SAVE_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "save.tmp")
                (folder / "save.tmp").replace(save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
