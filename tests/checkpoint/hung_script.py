"""A training script whose storage hangs: `hung_script.py DIRECTORY BEHIND MEMORY`.

It saves at each step, says on stdout what it does, as lines of JSON, and goes by lines on stdin.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import hpcrun


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main(directory: str, behind: str, memory: str) -> None:
    state = {"w": torch.zeros(1 << 20)}
    options: dict[str, Any] = {"on_backlog": behind} if memory != "0" else {}
    with hpcrun.Checkpointer(
        directory, memory=int(memory), keep=99, on_record=lambda one: say(record=one), **options
    ) as saves:
        for step, line in enumerate(sys.stdin, start=1):
            if line.strip() == "end":
                break
            begin = time.monotonic()
            begun = saves.save(step, state, wait=line.strip() == "lasting")
            saves.fence()
            state["w"].add_(1)
            say(step=step, begun=begun, seconds=time.monotonic() - begin)
    say(closed=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
