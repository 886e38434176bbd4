"""Random sets of hosts, folded and unfolded by a real scontrol, against what we make of the same words."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.hostlist import expand_hosts, fold_hosts, sort_hosts
from tests.lab.cluster import Lab

END = "--end--"


def random_set(dice: random.Random) -> list[str]:
    """Hosts of one to three naming schemes: with and without padding, racks, text behind the number."""
    hosts: dict[str, None] = {}
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        prefix = dice.choice(("n", "cn", "gpu-", "r1n", "rack-02-node", "a.b", "x_y", "ip-10-0-0-"))
        suffix = dice.choice(("", "", "", "d", "-ib", ".site.org"))
        width, top = dice.choice((1, 1, 2, 3, 4, 6)), 10 ** dice.choice((1, 2, 3, 4, 7))
        start, count = dice.randrange(top), dice.choice((1, 2, 5, 30, 120))
        numbers = range(start, start + count) if dice.random() < 0.6 else dice.choices(range(top), k=count)
        hosts |= dict.fromkeys(f"{prefix}{number:0{width}}{suffix}" for number in numbers)
    return list(hosts)


def ask(lab: Lab, folder: Path, words: Sequence[str], what: str) -> list[list[str]]:
    """What `scontrol show WHAT WORDS` prints, for each of the words."""
    questions = folder / "questions"
    questions.write_text("".join(f"{one}\n" for one in words))
    loop = f'while read -r one; do scontrol show {what} "$one"; echo {END}; done < {questions}'
    said = lab.run(["sh", "-c", loop], timeout_s=600).require_success().stdout
    answers = [part.split() for part in said.split(END)[:-1]]
    assert len(answers) == len(words)
    return answers


def differences(lab: Lab, folder: Path, count: int) -> Iterator[str]:
    """Where Slurm and we mean different hosts by the same words, over so many random sets."""
    dice = random.Random(13)
    sets = [[f"cn{number:03}" for number in range(1, 1001)], *(random_set(dice) for _ in range(count - 1))]
    folded = [one[0] for one in ask(lab, folder, [",".join(hosts) for hosts in sets], "hostlist")]
    ours = [fold_hosts(hosts, suffixes=False) for hosts in sets]
    unfolded = ask(lab, folder, folded, "hostnames")
    back = ask(lab, folder, ours, "hostnames")
    for hosts, text, names, mine, theirs in zip(sets, folded, unfolded, ours, back, strict=True):
        if set(expand_hosts(text)) != set(hosts) or list(expand_hosts(text)) != list(dict.fromkeys(names)):
            yield f"{text}: Slurm's folding, read as {expand_hosts(text)}"
        if set(theirs) != set(hosts) or set(sort_hosts(hosts)) != set(hosts):
            yield f"{mine}: our folding, read by Slurm as {theirs}"
