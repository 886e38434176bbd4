"""`hpcrun tune`: communication settings with reasons; the verbs are in modules of their own."""

from __future__ import annotations

import typer

from hpcrun.cli.tune_advise import advise, checklist, uptake
from hpcrun.cli.tune_lint import explain, lint
from hpcrun.cli.tune_policy import app as policy
from hpcrun.cli.tune_predict import predict, read
from hpcrun.errors import UsageError

TAKES_COMMAND = True
"""What stands behind `--` is the user's program."""

app = typer.Typer(
    no_args_is_help=True,
    help="Communication settings: what a job should have and why, what is wrong in an environment, what a"
    " variable means, which algorithm wins, what a log tells.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def refuse_program_command(context: typer.Context) -> None:
    """Only advice is about a program."""
    if context.obj is not None and context.invoked_subcommand != "advise":
        raise UsageError(f"tune {context.invoked_subcommand} takes no command after `--`")


for verb in (advise, lint, explain, predict, read, checklist, uptake):
    app.command()(verb)
app.add_typer(policy, name="policy")
