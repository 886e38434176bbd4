"""`hpcrun ckpt`: what a run has saved, and taking it elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look at saved steps and export them.",
)

Run = Annotated[str, typer.Argument(metavar="RUN", help="run directory, run id, or its unique beginning")]


@app.command("ls")
def list_steps(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False
) -> None:
    """List the saved steps of a run."""
    from hpcrun.specs.rundir import find_run
    from hpcrun.specs.saves import saved_steps

    found = saved_steps(find_run(run).checkpoints)
    if as_json:
        steps = [
            {"step": s.step, "samples": s.position, "world_size": s.world_size, "path": str(s.path)}
            for s in found
        ]
        print(json.dumps({"schema_version": 1, "steps": steps}))
        return
    for saved in found:
        ranks = f"{saved.world_size} rank{'s' * (saved.world_size > 1)}"
        print(f"step {saved.step}  {saved.position} samples  {ranks}  {saved.path}")


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", help="directory to make; must not exist or be empty")],
    step: Annotated[int | None, typer.Option(help="which saved step; default the newest")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """Write a saved step as a Hugging Face directory (config.json and safetensors)."""
    from hpcrun.runtime.export import export_hf
    from hpcrun.specs.rundir import find_run

    exported = export_hf(find_run(run), out, step=step, dtype=dtype)
    print(f"step {exported} written to {out}")
