"""`hpcrun chaos`: inject faults into one of your running runs, one by one or as a scenario."""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.chaos.faults import FAULT_KINDS, parse_fault
from hpcrun.cli.options import AsJson, DryRun, Run, make_app
from hpcrun.cli.output import note, print_json, print_lines
from hpcrun.errors import EXIT_CHECK_FAILED, SpecProblem, UsageError
from hpcrun.specs.run_lookup import find_run
from hpcrun.specs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrun.chaos.inject import InjectionTarget

app = make_app(
    "Inject faults into one of your running runs. Each is recorded in the run's chaos.jsonl and shown by"
    " `hpcrun events RUN`. Only processes of that run are affected."
)

_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")]

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "rank": (
        Annotated[int | None, typer.Option("--rank", metavar="R", help="Rank, counted over all nodes.")],
        None,
    ),
    "node": (Annotated[str | None, typer.Option("--node", metavar="N", help="Node of the run.")], None),
    "signal": (
        Annotated[str, typer.Option("--signal", metavar="NAME", help="KILL, TERM, SEGV, BUS or another.")],
        "KILL",
    ),
    "share": (
        Annotated[float, typer.Option("--share", help="Fraction of time during which the ranks are paused.")],
        0.5,
    ),
    "where": (
        Annotated[
            str | None,
            typer.Option("--where", metavar="DIR", help="Directory on the node's scratch or tmpfs."),
        ],
        None,
    ),
    "leave": (
        Annotated[str, typer.Option("--leave", metavar="SIZE", help="Leave this much free, such as 100M.")],
        "1M",
    ),
    "for": (
        Annotated[
            str | None, typer.Option("--for", metavar="TIME", help="Undo it after this time, such as 30s.")
        ],
        None,
    ),
    "random": (Annotated[bool, typer.Option("--random", help="Choose the target at random.")], False),
    "seed": (
        Annotated[
            int | None, typer.Option("--seed", metavar="N", help="Seed of --random, to repeat a choice.")
        ],
        None,
    ),
    "force": (
        Annotated[bool, typer.Option("--force", help="Allow faults that affect more than one node.")],
        False,
    ),
}
"""The options of faults by key, with their defaults; FAULT_KINDS says which fault takes which."""

_HELP = {
    "kill-rank": """Send a signal to a rank.

    It goes to the program and to all processes below it.
    """,
    "stop-rank": """Freeze a rank (SIGSTOP) as if it hung.

    Without --for it stays frozen until resume-rank.
    """,
    "resume-rank": "Let a frozen rank continue (SIGCONT).",
    "kill-agent": """Kill the agent on a node.

    What happens to its ranks is up to the run.
    """,
    "vanish": """Kill all of the run on a node at once.

    The agent goes first, as if the power failed. Unlike a power-off it is not silent: the kernel closes the
    connections, and Slurm keeps the node.
    """,
    "slow": """Slow the ranks of a node down.

    They are stopped for a share of every 0.2 s (SIGSTOP, SIGCONT).
    """,
    "fill-disk": """Fill a file system of a node.

    The file has no name, so it is gone when its process ends. A tmpfs takes memory of the node, which may
    count against the job.
    """,
    "kill-supervisor": """Kill the supervisor of a run.

    In a batch job another one takes over; otherwise the run ends.
    """,
}


def play(
    run: Run,
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.yaml", help="List of {at: 10s, do: kill-rank, rank: 1}.")
    ],
    yes: _Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Play a scenario: several faults in order.

    Each comes at its time (at: 10s) or after its step (step: 20). The whole scenario is checked before the
    first fault. Exit code 1 if one of them failed.
    """
    from hpcrun.chaos.inject import require_running
    from hpcrun.chaos.scenario import ScenarioRun, check_targets, load_scenario

    steps = load_scenario(scenario)
    run_dir = find_run(run, use="plan" if dry_run else "act")
    require_running(run_dir)
    plans = [
        f"at {step.when}: {target or f'{step.fault.do} (its target is not running yet)'}"
        for step, target in zip(steps, check_targets(run_dir, steps), strict=True)
    ]
    if dry_run:
        if as_json:
            print_json(run=run_dir.id, would=plans)
        else:
            print_lines(plans)
        return
    _confirm(run_dir, plans, yes)
    records: list[dict[str, Any]] = []

    def write(record: dict[str, Any]) -> None:
        records.append(record)
        if not as_json:
            _print_record(record)

    all_done = ScenarioRun(run_dir, note, write).run_all(steps)
    if as_json:
        print_json(run=run_dir.id, records=records, all_done=all_done)
    if not all_done:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _inject(do: str, run: str, yes: bool, dry_run: bool, as_json: bool, **values: Any) -> None:
    from hpcrun.chaos import inject

    fault, problems = parse_fault({"do": do} | {key.rstrip("_"): value for key, value in values.items()})
    if fault is None:
        raise UsageError("\n".join(str(SpecProblem(f"--{each.key}", each.text)) for each in problems))
    run_dir = find_run(run, use="plan" if dry_run else "act")
    inject.require_running(run_dir)
    target = inject.find_target(run_dir, fault)
    if dry_run:
        _print_dry_run(target, as_json)
        return
    if fault.is_random:
        note(f"at random: {target} (seed {target.fault.seed})")
    _confirm(run_dir, [str(target)], yes)
    records = inject.inject_fault(target, lambda record: None if as_json else _print_record(record))
    if as_json:
        print_json(run=run_dir.id, records=records)


def _print_dry_run(target: InjectionTarget, as_json: bool) -> None:
    command = target.command()
    if as_json:
        print_json(run=target.run.id, would=str(target), seed=target.fault.seed, command=command)
    else:
        print(f"would {target}\n{shlex.join(command)}")


def _confirm(run: RunDir, plans: Sequence[str], yes: bool) -> None:
    """Ask on a terminal; elsewhere go on."""
    if yes or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return
    for line in plans:
        note(f"{run.id}: {line}")
    if not typer.confirm("hpcrun: do it?", err=True):
        note("nothing was done")
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_record(record: dict[str, Any]) -> None:
    stamp = time.strftime("%H:%M:%S", time.localtime(record["time"]))
    pids = f" (pid {', '.join(map(str, record['pids']))})" if record["pids"] else ""
    print(f"{stamp}  {record['node']}: {record['text']}{pids}", flush=True)


def _make_fault_verb(do: str) -> Callable[..., None]:
    """The verb of a fault: RUN, the options that the fault takes, and those of all faults."""
    kind = FAULT_KINDS[do]
    target = () if kind.at == "run" else (kind.at, "random", "seed")
    options = {f"{key}_": _OPTIONS[key] for key in (*target, *kind.takes)}
    options |= {"yes": (_Yes, False), "dry_run": (DryRun, False), "as_json": (AsJson, False)}

    def verb(**values: Any) -> None:
        _inject(do, **values)

    verb.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY, annotation=Run)]
        + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
            for name, (hint, default) in options.items()
        ]
    )
    verb.__annotations__ = {"run": Run} | {name: hint for name, (hint, _) in options.items()}
    return verb


for _fault, _text in _HELP.items():
    app.command(_fault, help=_text)(_make_fault_verb(_fault))
app.command()(play)
