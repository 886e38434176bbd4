"""`hpcrun doctor pairs`: which two nodes to try next, and which node the trials show to be slow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.cli.output import print_findings, print_json, read_file
from hpcrun.errors import UsageError

if TYPE_CHECKING:
    from hpcrun.finding import Finding


def compare_pairs(
    words: Sequence[str], adapters: Sequence[str], at_least_GBps: float | None, as_json: bool
) -> list[Finding]:
    """Print what the outputs of trials show, and which to run next; returns the findings."""
    from hpcrun.hostlist import expand_hosts
    from hpcrun.tuning.host.pair_trials import (
        check_pair_trials,
        choose_next_pairs,
        evaluate_trials,
        parse_pair_trials,
        trial_endpoints,
        trials_of_nodes,
    )

    if not words:
        raise UsageError(
            "doctor pairs: name the nodes, and the outputs so far: doctor pairs n[01-16] [FILE...]"
        )
    nodes = list(expand_hosts(words[0]))
    if len(nodes) < 2:
        raise UsageError(f"doctor pairs {words[0]}: it takes two nodes; three or more can name one")
    ends = trial_endpoints(nodes, adapters)
    trials = [trial for name in words[1:] for trial in parse_pair_trials(read_file(Path(name)), name)]
    standing = evaluate_trials(ends, trials_of_nodes(ends, trials), at_least_GBps)
    findings, coming = list(check_pair_trials(standing)), choose_next_pairs(standing)
    if as_json:
        print_json(
            clear=[end for end in ends if end in standing.clear],
            slow=list(standing.named),
            below_GBps=standing.limit_GBps,
            next=[list(pair) for pair in coming],
            findings=[finding.as_json() for finding in findings],
        )
        return findings
    print_findings(findings)
    if coming and adapters:
        _print_next_adapters(coming)
    elif coming:
        _print_next(coming)
    elif not findings:
        print(f"all {len(ends)} {'adapters' if adapters else 'nodes'} are as fast as the others")
    return findings


def _print_next(coming: Sequence[tuple[str, str]]) -> None:
    print("try next, all at once; then give the outputs to `hpcrun doctor pairs` with those before:")
    for first, second in coming:
        step = f"srun --overlap --nodes=2 --nodelist={first},{second} --ntasks-per-node=G --gpus-per-node=G"
        print(f"  {step} all_reduce_perf -b 256M -e 256M -w 20 -n 50 > {first}+{second}.txt &")
    ranks = ",".join(node for pair in coming for node in pair)
    links = " ".join(f"{first}+{second}:{2 * at}-{2 * at + 1}" for at, (first, second) in enumerate(coming))
    print("or without GPUs, one after the other, with one rank a node in this order:")
    print(f"  {ranks}: python -m hpcrun.bench.pingpong links OUT.json {links}")


def _print_next_adapters(coming: Sequence[tuple[str, str]]) -> None:
    print("try next, all at once; then give the outputs to `hpcrun doctor pairs` with those before:")
    for at, (first, second) in enumerate(coming):
        (here, _, mine), (there, _, other) = first.partition(":"), second.partition(":")
        test = f"ib_write_bw -F -D 5 -s 1048576 -q 4 --report_gbits -p {18515 + at}"
        print(f"  srun --overlap --nodes=1 --nodelist={there} {test} -d {other} & sleep 2")
        client = f"srun --overlap --nodes=1 --nodelist={here} {test} -d {mine} {there}"
        print(f"  {client} > '{first}+{second}.txt' &")
    print(
        "with GPUs: perftest built for CUDA, and --use_cuda=INDEX of the GPU near the adapter on both sides"
    )
