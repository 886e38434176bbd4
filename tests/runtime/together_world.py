"""Ranks of which one raises where all agree: `together_world.py DIRECTORY VERBS MEMORIES STRIDE`.

In each method of Checkpointer one rank raises at its first agreement, at its second, and so on, before it has
come to it and after; what the others raise, and whether the next one works, is printed by rank 0 as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hpcrun
from hpcrun.errors import RanksDiedError
from hpcrun.launch.world import detect_world
from hpcrun.runtime import checkpointer as face
from hpcrun.runtime.control import Control, connect
from hpcrun.runtime.script_run import open_control

LIMIT_S = 60.0
KINDS: tuple[type[BaseException], ...] = (ValueError, KeyboardInterrupt, MemoryError, OSError)


class Trap:
    """Makes a control raise at its n-th message."""

    def __init__(self) -> None:
        self.left, self.kind, self.fired = -1, KINDS[0], False
        self.is_late = False

    def set(self, number: int) -> None:
        """At message NUMBER // 2; an odd one after its message is on its way."""
        self.left, self.is_late, self.fired = number // 2, bool(number % 2), False
        self.kind = KINDS[number % len(KINDS)]

    def arm(self, control: Control) -> Control:
        for name in ("allgather", "broadcast", "start_agreeing"):
            setattr(control, name, self._armed(getattr(control, name)))
        return control

    def _armed(self, send: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(value: Any) -> Any:
            fires = self.left == 0
            self.left -= 1
            if fires and not self.is_late:
                self._fire()
            told = send(value)
            if fires:
                self._fire()
            return told

        return call

    def _fire(self) -> None:
        self.fired = True
        raise self.kind("said by one alone")


def state_of(rank: int, value: float) -> dict[str, Any]:
    return {"w": torch.full((64,), value), "mine": {"rank": rank, "value": value}}


class Play:
    """One rank of a world in which a victim raises."""

    def __init__(self, desk: Control, root: Path) -> None:
        self.desk, self.root, self.told = desk, root, list[dict[str, Any]]()
        self.trap = Trap()
        vars(face)["open_control"] = lambda environ: self.trap.arm(open_control(environ))

    def every(self, verb: str, memory: int, victim: int, stride: int, first: int) -> None:
        """A fault at every agreement of a method, until it has no more of them."""
        number = first
        while self._one(verb, memory, victim, number):
            number += stride

    def _one(self, verb: str, memory: int, victim: int, number: int) -> bool:
        folder = self.root / f"{verb}-{memory}-{victim}-{number}"
        mine = self.desk.rank == victim
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        begin, said, is_whole = time.monotonic(), "", False
        if verb == "open":
            said = self._caught(lambda: hpcrun.Checkpointer(folder, memory=memory).close(), mine, number)
        else:
            with hpcrun.Checkpointer(folder, memory=memory) as saves:
                saves.save(1, state_of(self.desk.rank, 1.0))
                saves.fence()
                said = self._caught(self._doing(saves, verb), mine, number)
                if verb != "close":
                    state = state_of(self.desk.rank, 3.0)
                    if said == "nothing" and not mine:  # what comes after the last agreement is heard later
                        said = self._caught(lambda: saves.save(3, state, wait=True), mine, number)
                    if said != "nothing" or mine:
                        saves.save(3, state, wait=True)
        seconds, self.trap.left = time.monotonic() - begin, -1
        with hpcrun.Checkpointer(folder, memory=memory) as saves:
            saves.save(4, state_of(self.desk.rank, 4.0), wait=True)
            fresh = state_of(9, 0.0)
            step = saves.load(fresh)
            is_whole = step == 4 and fresh["mine"] == {"rank": self.desk.rank, "value": 4.0}
        faulthandler.cancel_dump_traceback_later()
        every = self.desk.allgather([said, self.trap.fired, is_whole, seconds])
        if every[victim][1]:
            self.told.append(
                {
                    "case": [verb, memory, victim, number],
                    "said": [one[0] for one in every],
                    "whole": all(one[2] for one in every),
                    "seconds": max(one[3] for one in every),
                    "node": self.desk.node,
                }
            )
        self.trap.fired = False
        return bool(every[victim][1])

    def _doing(self, saves: hpcrun.Checkpointer, verb: str) -> Callable[[], Any]:
        state = state_of(self.desk.rank, 2.0)
        return {
            "save": lambda: saves.save(2, state),
            "wait": lambda: saves.save(2, state, wait=True),
            "load": lambda: saves.load(state),
            "close": saves.close,
        }[verb]

    def _caught(self, action: Callable[[], Any], mine: bool, number: int) -> str:
        self.trap.set(number) if mine else None
        try:
            action()
        except (*KINDS, RanksDiedError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.trap.left = -1
        return "nothing"


def silent_in(told: dict[str, Any]) -> list[str]:
    """What is wrong with a case: of the victim's own error, and of what the others raise."""
    *_, victim, number = told["case"]
    kind = KINDS[number % len(KINDS)].__name__
    wrong = []
    for rank, said in enumerate(told["said"]):
        words = "said by one alone"
        own = f"{kind}: {words}"
        others = f"rank {victim} on {told['node']}: {own}"
        is_last = number % 2 and told["case"][0] == "close" and said == "nothing"
        if not (said == own if rank == victim else said.endswith(others) or is_last):
            wrong.append(f"{told['case']}: rank {rank} said {said!r}")
    if not told["whole"]:
        wrong.append(f"{told['case']}: what was saved afterwards did not come back")
    return wrong


def main(directory: str, verbs: str, memories: str, stride: str) -> None:
    """All cases in one world."""
    desk = connect(detect_world(os.environ))
    play = Play(desk, Path(directory))
    for memory in map(int, memories.split(",")):
        for turn, verb in enumerate(verbs.split(",")):
            for victim in (0, desk.size - 1):
                play.every(verb, memory, victim, int(stride), (turn + victim) % int(stride))
    desk.barrier()
    if desk.rank == 0:
        print(json.dumps(play.told))
    desk.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
