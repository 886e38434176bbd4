"""`hpcrun tune`: advise, check and explain communication settings; each verb has its module."""

from __future__ import annotations

import typer

from hpcrun.cli.options import make_app
from hpcrun.cli.tune_advise import advise, checklist, uptake
from hpcrun.cli.tune_lint import explain, lint
from hpcrun.cli.tune_policy import app as policy
from hpcrun.cli.tune_predict import predict, read
from hpcrun.errors import UsageError

TAKES_COMMAND = True
"""What follows `--` is the user's command."""

app = make_app("Advise, check and explain settings of NCCL and MPI; predict algorithms; read NCCL logs.")


@app.callback()
def refuse_program_command(context: typer.Context) -> None:
    """Only advise takes a command."""
    if context.obj is not None and context.invoked_subcommand != "advise":
        raise UsageError(f"tune {context.invoked_subcommand} takes no command after `--`")


for verb in (advise, lint, explain, predict, read, checklist, uptake):
    app.command()(verb)
app.add_typer(policy, name="policy")
