"""The command: loads the module of the verb and no other, turns errors into lines and exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast

from hpcrun import __version__, local_identity
from hpcrun.cli.internal import INTERNAL_VERBS
from hpcrun.cli.streams import OutputStreams
from hpcrun.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_SITE,
    EXIT_USAGE,
    HpcrunError,
    SiteError,
    UsageError,
)

OutputUse = Literal["is read", "is told", "is needed"]
"""is read: the command ends with its reader · is told: its effect stands even if its output is lost ·
is needed: output that cannot be written is a failure."""


class CommandVerb(NamedTuple):
    """Where a verb lives, and its line of help; the module's Typer `app` may hold several verbs."""

    module: str
    help: str
    output: OutputUse = "is needed"
    holds_signals: bool = False
    """Signals stay blocked while the module is loaded; it opens a SignalQueue, or unblocks them."""


VERBS = {
    "train": CommandVerb("train", "run a job here and now; --resume RUN continues one", "is told", True),
    "submit": CommandVerb("submit", "submit a job to the cluster; --dry-run prints the script", "is told"),
    "list": CommandVerb("runs", "list runs and their progress", "is read"),
    "status": CommandVerb("runs", "show what a run is doing, or how it ended", "is read"),
    "describe": CommandVerb("runs", "show a run's origin, files, attempts and goodput", "is read"),
    "wait": CommandVerb("runs", "wait until runs are over, and exit with their code", "is told"),
    "logs": CommandVerb("runs", "print the output of a rank (-f to follow)", "is read"),
    "cancel": CommandVerb("runs", "ask runs to save and stop, or dequeue them", "is told"),
    "save": CommandVerb("events", "ask runs to save now and continue", "is told"),
    "stop": CommandVerb("events", "ask runs to save and stop (--wait until they have)", "is told"),
    "events": CommandVerb("events", "show a run's event log (-f to follow)", "is read"),
    "postmortem": CommandVerb(
        "events", "collect logs and records in one archive, secrets redacted", "is told"
    ),
    "chaos": CommandVerb("chaos", "inject faults into one of your running runs", "is told"),
    "metrics": CommandVerb("metrics", "print metrics for Prometheus, or a Grafana dashboard"),
    "data": CommandVerb("data", "make token files, inspect what a job would train on"),
    "ckpt": CommandVerb("ckpt", "list, verify, repair, compare, export checkpoints"),
    "cluster": CommandVerb("cluster", "show, draft or check a cluster profile"),
    "fabric": CommandVerb("fabric", "show the network, free nodes, the placement of a job"),
    "tune": CommandVerb("tune", "advise, check and explain communication settings"),
    "doctor": CommandVerb("doctor", "find faults in the network of a node or an allocation"),
    "template": CommandVerb("template", "list, show, export and check sbatch templates"),
    "demo": CommandVerb("demo", "train, stop, resume and compare on this machine", "is told"),
}


_PRINTING_OPTIONS = {"--help", "--dry-run", "--print-spec", "--print-schema"}
"""With these, every verb only prints."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; every error that a person can act on is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    streams = OutputStreams()
    output = _output_policy(arguments)
    if output == "is read":
        streams.end_with_reader()
    try:
        code = _run(arguments)
    except HpcrunError as error:
        _note(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough.
        code = EXIT_DONE
    except OSError as error:
        if arguments[:1] and arguments[0] in INTERNAL_VERBS:  # the traceback belongs in their logs
            raise
        _note(_format_os_error(error))
        code = EXIT_SITE
    if lost := streams.lost():
        _note(lost)
        code = code if output == "is told" else code or EXIT_SITE
    sys.exit(code)


def _output_policy(arguments: list[str]) -> OutputUse:
    """What lost output means for a command."""
    verb, *rest = arguments or [""]
    if verb in INTERNAL_VERBS:
        return "is told"
    own = rest[: rest.index("--")] if "--" in rest else rest
    only_prints = not _PRINTING_OPTIONS.isdisjoint(own)
    return VERBS[verb].output if verb in VERBS and not only_prints else "is needed"


def _format_os_error(error: OSError) -> str:
    """The system's error, and the file or directory."""
    message = error.strerror or str(error) or type(error).__name__
    if error.filename:
        return f"{error.filename}: {message}"
    try:
        local_identity.working_directory()
    except SiteError as missing:  # the system does not name it
        return str(missing)
    return message


def _run(arguments: list[str]) -> int:
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        _print_help()
        return EXIT_DONE
    if verb == "--version":
        print(f"hpcrun {__version__}")
        return EXIT_DONE
    if verb in INTERNAL_VERBS:
        return INTERNAL_VERBS[verb](*rest)
    if verb not in VERBS:
        raise UsageError(f"{verb}: no such command{_suggest_nearest(verb)}; there are: {', '.join(VERBS)}")
    return _run_verb(verb, rest)


def _run_verb(verb: str, rest: list[str]) -> int:
    if VERBS[verb].holds_signals:
        from hpcrun.launch.signal_queue import block_signals

        block_signals()
    # Typer would drop the `--`, and with it the difference between our options and those of the command.
    after: list[str] | None = None
    if "--" in rest:
        at = rest.index("--")
        rest, after = rest[:at], rest[at + 1 :]
    module = importlib.import_module(f"hpcrun.cli.{VERBS[verb].module}")
    import typer

    # The base of all usage errors has had several homes in Typer's releases, but one name.
    usage_error: type[Exception] = next(
        base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
    )
    command = typer.main.get_command(module.app)
    command = getattr(command, "commands", {}).get(verb, command)
    if after is not None and not getattr(module, "TAKES_COMMAND", False):
        raise UsageError(f"{verb} takes no command after `--` (found: {' '.join(after)})")
    try:
        # Not through its `main`, which would turn a closed pipe and an interrupt into codes of its own.
        with command.make_context(f"hpcrun {verb}", rest, obj=after) as context:
            from hpcrun.cli.terminal import escaping_streams

            with escaping_streams():
                command.invoke(context)
    except typer.Exit as leave:
        return leave.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except usage_error as error:
        text = str(cast(Any, error).format_message())
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{text}\n")
            return EXIT_USAGE
        raise UsageError(f"{text} (see `hpcrun {verb} --help`)") from None
    return EXIT_DONE


def _print_help() -> None:
    print("usage: hpcrun VERB ...\n\nDistributed training, from the laptop to the cluster.\n")
    width = max(map(len, VERBS))
    for name, verb in VERBS.items():
        print(f"  {name:{width}}  {verb.help}")
    print(
        "\n`hpcrun VERB --help` says more. Exit codes: 0 done, 1 a check failed, 2 usage or\n"
        "job file, 3 site, 4 not a number, 5 ranks died, 75 saved (to be resumed),\n"
        "130 interrupted."
    )


def _note(text: str) -> None:
    from hpcrun.cli.output import note

    note(text)


def _suggest_nearest(word: str) -> str:
    import difflib

    close = difflib.get_close_matches(word, VERBS, n=1)
    return f"; did you mean {close[0]}?" if close else ""
