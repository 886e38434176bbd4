"""Ranks of which one raises where all agree: `collective_verbs_world.py DIRECTORY VERBS MEMORIES STRIDE`,
and a rank that is killed: `collective_verbs_world.py DIRECTORY kill RANK`.

In each method of Checkpointer one rank raises at its first agreement, at its second, and so on, before it has
come to it and after; what the others raise, and whether the next one works, is printed by rank 0 as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hpcrun
from hpcrun.errors import HpcrunError
from hpcrun.launcher_world import detect_world
from hpcrun.runtime import checkpointer as face
from hpcrun.runtime.connect import connect_ranks, open_control
from hpcrun.runtime.control import Control

LIMIT_S = 60.0
KINDS: tuple[type[BaseException], ...] = (ValueError, KeyboardInterrupt, MemoryError, OSError)
CAUGHT: tuple[type[BaseException], ...] = (*KINDS, RuntimeError, HpcrunError)


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
                state = state_of(self.desk.rank, 3.0)
                # Either the same step is tried again, or the next one.
                later = 3 if number % 4 < 2 else 2
                again = saves.close if verb == "close" else lambda: saves.save(later, state, wait=True)
                if said == "nothing" and not mine:  # what comes after the last agreement is heard later
                    said = self._caught(again, mine, number)
                if said != "nothing" or mine:
                    again()
        seconds, self.trap.left = time.monotonic() - begin, -1
        with hpcrun.Checkpointer(folder, memory=memory) as saves:
            saves.load(state_of(9, 0.0))
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
        doing: dict[str, Callable[[], Any]] = {
            "save": lambda: saves.save(2, state),
            "wait": lambda: saves.save(2, state, wait=True),
            "load": lambda: saves.load(state),
            "close": saves.close,
        }
        return doing[verb]

    def _caught(self, action: Callable[[], Any], mine: bool, number: int) -> str:
        if mine:
            self.trap.set(number)
        try:
            action()
        except CAUGHT as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.trap.left = -1
        return "nothing"

    def odd(self, victim: int) -> None:
        """What one rank's state is or does, and not a message, ends all."""
        mine = self.desk.rank == victim
        good: dict[str, Any] = {"w": torch.ones(8), "object": Moody("")}
        states: dict[str, tuple[str, dict[str, Any]]] = {
            "cannot be saved": ("save", {"w": torch.ones(8), "object": object()}),
            "tells no state": ("save", {"w": torch.ones(8), "object": Moody("tell")}),
            "takes no state": ("load", {"w": torch.zeros(8), "object": Moody("take")}),
            "means another step": ("save", good),
        }
        if victim == 0:  # its step is the one that is meant
            del states["means another step"]
        for name, (verb, bad) in states.items():
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            begin = time.monotonic()
            with hpcrun.Checkpointer(self.root / f"{name}-{victim}", memory=0) as saves:
                saves.save(1, good)
                state = bad if mine else dict(good)
                step = 3 if mine and state is good else 2
                action = partial(saves.save, step, state) if verb == "save" else partial(saves.load, state)
                said = self._caught(action, False, 0)
                again = saves.load(dict(good))
            self._note([name, 0, victim, verb], said, again in (1, 2), begin)

    def mixed(self) -> None:
        """Ranks call different methods."""
        for memory in (0, 2):
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            begin = time.monotonic()
            with hpcrun.Checkpointer(self.root / f"mixed-{memory}", memory=memory) as saves:
                saves.save(1, state_of(self.desk.rank, 1.0), wait=True)
                for other in ("load", "close", "wait"):
                    verb = "save" if self.desk.rank else other
                    said = self._caught(self._doing(saves, verb), False, 0)
                    whole = saves.load(state_of(0, 0.0)) == 1
                    self._note([f"save while another rank calls {other}", memory, 0, 0], said, whole, begin)
                # That a close was refused is over by then.
                victim, good = self.desk.size - 1, state_of(self.desk.rank, 2.0)
                state = good | ({"cannot be saved": object()} if self.desk.rank == victim else {})
                faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                said = self._caught(partial(saves.save, 2, state), False, 0)
                saves.save(2, good, wait=True)
                whole = saves.load(state_of(0, 0.0)) == 2
                self._note(
                    ["an error after a refused close", memory, victim, 0], said, whole, time.monotonic()
                )

    def _note(self, case: list[Any], said: str, is_whole: bool, begin: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        every = self.desk.allgather([said, is_whole, time.monotonic() - begin])
        told = {"said": [one[0] for one in every], "whole": all(one[1] for one in every)}
        self.told.append({"case": case, **told, "seconds": max(one[2] for one in every), "node": ""})


class Moody:
    """Has a state, and may not take it, or tell it."""

    def __init__(self, mood: str) -> None:
        self.mood, self.count = mood, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        if self.mood == "tell":
            raise ValueError("said by one alone")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.mood == "take":
            raise RuntimeError("said by one alone")
        self.count = state["count"]


def silent_in(told: dict[str, Any]) -> list[str]:
    """What is wrong with a case: of the victim's own error, and of what the others raise."""
    *_, victim, number = told["case"]
    name, said = told["case"][0], told["said"]
    if told["node"] == "":
        is_mixed = name.startswith("save while")
        is_right = "ranks do not call the same" if is_mixed else f"rank {victim} on "
        wrong = [one for rank, one in enumerate(said) if rank != victim and is_right not in one]
        wrong += [one for one in said if not is_mixed and said.index(one) == victim and "Error" not in one]
        return [f"{name}: {wrong}, {told['whole']}"] if wrong or not told["whole"] else []
    kind = KINDS[number % len(KINDS)].__name__
    wrong = []
    # After its last message in what ends with a close others may have come through: they wait for nobody.
    may_be_last = number % 2 and name in ("close", "open")
    for rank, said in enumerate(told["said"]):
        words = "said by one alone"
        own = f"{kind}: {words}"
        others = f"rank {victim} on {told['node']}: {own}"
        is_through = may_be_last and said == "nothing"
        if not (said == own if rank == victim else others in said or is_through):
            wrong.append(f"{told['case']}: rank {rank} said {said!r}")
    if not told["whole"]:
        wrong.append(f"{told['case']}: what was saved afterwards did not come back")
    return wrong


def be_killed(directory: str, victim: str) -> None:
    """One rank is killed in the middle of a save; what the others raise is left in a file."""
    place, rank = Path(directory), int(os.environ["RANK"])
    trap, control = Trap(), open_control(os.environ)
    vars(face)["open_control"] = lambda _environ: trap.arm(control)
    vars(trap)["_fire"] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    saves = hpcrun.Checkpointer(place / "run", memory=0)
    saves.save(1, state_of(rank, 1.0))
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    trap.left = 2 if rank == int(victim) else -1
    begin = time.monotonic()
    try:
        saves.save(2, state_of(rank, 2.0))
    except HpcrunError as error:
        told = [str(error), time.monotonic() - begin]
        (place / f"said-{rank}.json").write_text(json.dumps(told))


def main(directory: str, verbs: str, memories: str, stride: str) -> None:
    """All cases in one world."""
    desk = connect_ranks(detect_world(os.environ))
    play = Play(desk, Path(directory))
    for memory in map(int, memories.split(",")):
        for turn, verb in enumerate(verbs.split(",")):
            for victim in (0, desk.size - 1):
                play.every(verb, memory, victim, int(stride), (turn + victim) % int(stride))
    for victim in (0, desk.size - 1):
        play.odd(victim)
    play.mixed()
    desk.barrier()
    if desk.rank == 0:
        print(json.dumps(play.told))
    desk.barrier()


if __name__ == "__main__":
    if sys.argv[2] == "kill":
        be_killed(sys.argv[1], sys.argv[3])
    else:
        main(*sys.argv[1:])
