"""`hpcrun demo`: train, stop, resume and compare on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from hpcrun.cli.display import command_name
from hpcrun.cli.options import make_app
from hpcrun.cli.output import note
from hpcrun.errors import EXIT_CHECK_FAILED
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.local_identity import display_path
from hpcrun.units import format_duration

if TYPE_CHECKING:
    from hpcrun.launch.demo import Demonstration, LossCurve

app = make_app()

_WIDTH, _HEIGHT = 60, 12


@app.command()
def demo() -> None:
    """Train a small model on eight ranks here, stop it halfway and resume it.

    The losses are compared with those of an undisturbed run. Takes a few minutes on two cores. The text it
    learns is Python's standard library, byte by byte.
    """
    begin = time.monotonic()
    with SignalQueue() as inbox:
        from hpcrun.cli.display import make_display
        from hpcrun.launch.demo import Demonstration, demonstrate

        def say(text: str) -> None:
            typer.echo(f"\n== {text}", err=True)

        result = demonstrate(inbox, lambda prepared: make_display(prepared.spec.train.steps), say)
    if not isinstance(result, Demonstration):
        if result.message:
            note(result.message)
        raise typer.Exit(result.exit_code)
    _print_summary(result, time.monotonic() - begin)
    if not (result.learned and result.same_curve):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_summary(result: Demonstration, seconds: float) -> None:
    print("\nLoss of every step, stopped and resumed (*) over undisturbed (o)")
    print(_plot(result.resumed_curve, result.undisturbed_curve, result.stopped_at))
    gap = max(abs(a[1] - b[1]) for a, b in zip(result.resumed_curve, result.undisturbed_curve, strict=False))
    same = "identical in every bit" if result.same_curve else f"DIFFERENT: largest gap {gap:.3g}"
    verdict = "" if result.learned else "  NOT LEARNED"
    print(f"training loss   {result.first_loss:.3f} -> {result.last_loss:.3f}")
    print(f"held-out loss   {result.eval_before:.3f} -> {result.eval_after:.3f}{verdict}")
    print(f"stopped at step {result.stopped_at}, resumed; the {len(result.resumed_curve)} losses are {same}")
    print(f"run directory   {result.interrupted.path}")
    print(f"time            {format_duration(seconds)}")
    again, run = command_name(), result.interrupted.id
    print("\nNext:")
    print(f"  {again} status {run}")
    print(f"  {again} ckpt ls {run}")
    print(f"  {again} ckpt export {run} --out my-model      # a Hugging Face directory")
    print(f"  {again} train {_demo_job()} train.steps=200 parallel.pp=1 parallel.dp_shard=1")


def _demo_job() -> str:
    from hpcrun.specs.shipped import shipped_file

    return display_path(shipped_file("jobs/demo.yaml"))


def _plot(resumed: LossCurve, undisturbed: LossCurve, stopped_at: int) -> str:
    """Both curves in characters, a bar where the run was stopped."""
    points = [*resumed, *undisturbed]
    last, low, high = max(s for s, _ in points), min(v for _, v in points), max(v for _, v in points)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]

    def column(step: int) -> int:
        return round((step - 1) / max(1, last - 1) * (_WIDTH - 1))

    for row in grid:
        row[column(stopped_at)] = ":"
    for mark, curve in (("o", undisturbed), ("*", resumed)):
        for step, loss in curve:
            row_index = round((high - loss) / max(high - low, 1e-9) * (_HEIGHT - 1))
            grid[row_index][column(step)] = mark
    lines = []
    for index, row in enumerate(grid):
        value = high - (high - low) * index / (_HEIGHT - 1)
        lines.append(f"{value:6.2f} |{''.join(row)}")
    axis = f"{'':6} +{'-' * _WIDTH}\n{'':8}step 1{f'stopped at {stopped_at}':^{_WIDTH - 12}}{last:>6}"
    return "\n".join([*lines, axis])
