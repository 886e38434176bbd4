"""`hpcrun tune`: communication settings, and what to expect of them."""

from __future__ import annotations

import typer

from hpcrun.cli.tune_predict import predict, read

app = typer.Typer(
    no_args_is_help=True,
    help="Communication settings, and what to expect of them.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(predict)
app.command()(read)
