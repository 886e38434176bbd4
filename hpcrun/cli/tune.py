"""`hpcrun tune`: communication settings with reasons."""

from __future__ import annotations

import typer

from hpcrun.cli.tune_advise import advise, checklist, uptake

TAKES_COMMAND = True
"""What stands behind `--` is the user's program."""

app = typer.Typer(
    no_args_is_help=True,
    help="Communication settings: what a job should have and why, and what became of them.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(advise)
app.command()(checklist)
app.command()(uptake)
