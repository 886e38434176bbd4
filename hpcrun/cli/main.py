"""The command: finds the verb, loads its module and no other, and turns errors into lines and exit codes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, cast

from hpcrun import __version__, local_identity
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

if TYPE_CHECKING:
    from hpcrun.launch.failover.guardian import SupervisorCrash


class CommandVerb(NamedTuple):
    """Where a verb lives, and its line of help; the module's Typer `app` may hold several verbs."""

    module: str
    help: str
    holds_signals: bool = False
    """Signals wait while the module is loaded; it opens an Inbox, or lets them through."""
    output: Literal["is read", "is told", "is needed"] = "is needed"
    """is read: the command ends with its reader · is told: what it has done stands, whoever hears of it ·
    is needed: output that is lost for want of room is a failure."""


VERBS = {
    "train": CommandVerb(
        "hpcrun.cli.train", "run a job here, now; --resume RUN goes on with one", True, "is told"
    ),
    "submit": CommandVerb(
        "hpcrun.cli.submit", "hand a job over to the cluster; --dry-run shows the script", False, "is told"
    ),
    "list": CommandVerb("hpcrun.cli.runs", "the runs, and how far each has come", False, "is read"),
    "status": CommandVerb("hpcrun.cli.runs", "what a run is doing, or how it ended", False, "is read"),
    "describe": CommandVerb("hpcrun.cli.runs", "everything that is known of a run", False, "is read"),
    "wait": CommandVerb(
        "hpcrun.cli.runs", "wait until runs are over; the exit code is theirs", False, "is told"
    ),
    "logs": CommandVerb("hpcrun.cli.runs", "what a rank has printed; -f follows it", False, "is read"),
    "cancel": CommandVerb("hpcrun.cli.runs", "ask a run to save and stop", False, "is told"),
    "save": CommandVerb("hpcrun.cli.events", "ask a run to save now, and to go on", False, "is told"),
    "stop": CommandVerb(
        "hpcrun.cli.events", "ask a run to save and stop; --wait until it has", False, "is told"
    ),
    "events": CommandVerb(
        "hpcrun.cli.events", "the story of a run in plain lines; -f follows it", False, "is read"
    ),
    "postmortem": CommandVerb(
        "hpcrun.cli.events", "one tar with what an engineer asks for, without secrets", False, "is told"
    ),
    "chaos": CommandVerb(
        "hpcrun.cli.chaos", "rehearse faults on a running run of one's own", False, "is told"
    ),
    "metrics": CommandVerb("hpcrun.cli.metrics", "a run's figures for Prometheus; --dashboard for Grafana"),
    "data": CommandVerb("hpcrun.cli.data", "make token files, and look at what a job would train on"),
    "ckpt": CommandVerb(
        "hpcrun.cli.ckpt", "the saves of a run: list, prove, repair, compare, clean up, move"
    ),
    "cluster": CommandVerb(
        "hpcrun.cli.cluster", "the cluster's profile: show, draft, check against the live Slurm"
    ),
    "fabric": CommandVerb(
        "hpcrun.cli.fabric", "the network: its shape, what is free, where a job would stand"
    ),
    "tune": CommandVerb(
        "hpcrun.cli.tune", "communication settings: advice, lint, what a variable means, uptake"
    ),
    "doctor": CommandVerb(
        "hpcrun.cli.doctor", "what is wrong with a node's network; which node is the odd one"
    ),
    "template": CommandVerb(
        "hpcrun.cli.template", "the site's sbatch templates: list, show, export, check, diff"
    ),
    "demo": CommandVerb(
        "hpcrun.cli.demo", "see it work here: train, stop, resume, compare", False, "is told"
    ),
}


_PRINTING_OPTIONS = {"--help", "--dry-run", "--print-spec", "--print-schema"}
"""With these, every verb does nothing but print."""


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
        _print_error(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        code = EXIT_DONE
    except OSError as error:
        if arguments[:1] and arguments[0] in _INTERNAL:  # their logs are read by those who look for a cause
            raise
        _print_error(_format_os_error(error))
        code = EXIT_SITE
    if lost := streams.lost():
        _print_error(lost)
        code = code if output == "is told" else code or EXIT_SITE
    sys.exit(code)


def _output_policy(arguments: list[str]) -> Literal["is read", "is told", "is needed"]:
    """What becomes of a command whose output nobody takes; see CommandVerb."""
    verb, *rest = arguments or [""]
    if verb in _INTERNAL:
        return "is told"
    own = rest[: rest.index("--")] if "--" in rest else rest
    is_shown = not _PRINTING_OPTIONS.isdisjoint(own)
    return VERBS[verb].output if verb in VERBS and not is_shown else "is needed"


def _format_os_error(error: OSError) -> str:
    """What the system refused, and where."""
    told = error.strerror or str(error) or type(error).__name__
    if error.filename:
        return f"{error.filename}: {told}"
    try:
        local_identity.working_directory()
    except SiteError as gone:  # which the system does not name
        return str(gone)
    return told


def _run(arguments: list[str]) -> int:
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        _print_help()
        return EXIT_DONE
    if verb == "--version":
        print(f"hpcrun {__version__}")
        return EXIT_DONE
    if verb in _INTERNAL:
        return _INTERNAL[verb](*rest)
    if verb not in VERBS:
        raise UsageError(f"{verb}: no such command{_suggest_nearest(verb)}; there are: {', '.join(VERBS)}")
    return _run_verb(verb, rest)


def _run_verb(verb: str, rest: list[str]) -> int:
    if VERBS[verb].holds_signals:
        from hpcrun.launch.signal_queue import block_signals

        block_signals()
    # Typer would drop the `--`, and with it the difference between our options and another program's.
    after: list[str] | None = None
    if "--" in rest:
        at = rest.index("--")
        rest, after = rest[:at], rest[at + 1 :]
    module = importlib.import_module(VERBS[verb].module)
    import typer

    # The base of all usage errors has had several homes in Typer's releases, but one name.
    mistake: type[Exception] = next(
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
    except mistake as error:
        text = str(cast(Any, error).format_message())
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{text}\n")
            return EXIT_USAGE
        raise UsageError(f"{text} (see `hpcrun {verb} --help`)") from None
    return EXIT_DONE


def _run_rank(run_dir: str, number: str) -> int:
    """The internal verb `_rank RUN ATTEMPT`: the shim first, so that whatever comes after is logged."""
    from pathlib import Path

    from hpcrun.launch import rank_shim
    from hpcrun.launcher_world import World, detect_world
    from hpcrun.specs import rank_error
    from hpcrun.specs.rundir import RunDir

    attempt = RunDir(Path(run_dir)).attempt(int(number))
    world = detect_world(os.environ) or World("single", 0, 1, 0, 1)
    requests = rank_shim.enter_rank(attempt, world)
    try:
        code = int(importlib.import_module("hpcrun.runtime.entry").main(run_dir, int(number), requests))
        rank_shim.ignore_request_signals()
        return code
    except BaseException as error:  # noqa: BLE001 - the outermost frame of a rank
        rank_error.report_error(attempt, world.rank, error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly exit would wait in MPI_Finalize for the others.
        os._exit(rank_error.exit_code_of(error))


def _run_agent(run_dir: str, called: str = "") -> int:
    """The internal verb `_agent RUN [called]`: what the supervisor starts on each node of an allocation."""
    from pathlib import Path

    from hpcrun.launch.agents.agent import Agent
    from hpcrun.specs.rundir import RunDir

    Agent(RunDir(Path(run_dir)), is_called_back=bool(called)).serve()
    return EXIT_DONE


def _run_successor(run_dir: str, epoch: str) -> int:
    """The internal verb `_failover RUN EPOCH`: the supervisor that an agent starts after a failover."""
    from hpcrun.launch.signal_queue import block_signals

    block_signals()
    return int(importlib.import_module("hpcrun.launch.failover.failover_main").run_failover(run_dir, epoch))


def _run_batch_task(folder: str) -> int:
    """The internal verb `_task FOLDER`: a submitted job; its signals wait until somebody can read them."""
    from hpcrun.launch.failover.guardian import supervise_with_restarts
    from hpcrun.launch.signal_queue import block_signals

    block_signals()
    return supervise_with_restarts(lambda fall: _run_supervisor(folder, fall))


def _run_supervisor(folder: str, fall: SupervisorCrash | None) -> int:
    """What that job does, in a child of the process that the batch script waits for; see its module."""
    try:
        task = importlib.import_module("hpcrun.launch.batch_task")
        importlib.import_module("submitit")
    except ImportError as error:
        words = "the job's python, or python.path in the profile, must be one that has hpcrun installed"
        raise SiteError(f"{sys.executable} on {os.uname().nodename}: {error}; {words}") from None
    return int(task.run_submitted(folder, fall))


def _run_function_call() -> int:
    """The internal verb `_call`: a rank of a function's run; see its module."""
    return int(importlib.import_module("hpcrun.submission.function_call").main())


def _execute_injection(run_dir: str, order: str) -> int:
    """The internal verb `_chaos RUN ORDER`: what a rehearsal starts where its victim is."""
    import json
    from pathlib import Path

    from hpcrun.chaos.injector import execute_injection
    from hpcrun.specs.rundir import RunDir

    return execute_injection(RunDir(Path(run_dir)), json.loads(order))


def _run_sidecar(run_dir: str, name: str = "") -> int:
    """The internal verb `_beside RUN [NAME]`: who tells others of a run while it goes on."""
    return int(importlib.import_module("hpcrun.telemetry.sidecar").main(run_dir, name))


def _run_checkpoint_worker(root: str = "") -> int:
    """The internal verb `_checkpoint_worker [ROOT]`: the checkpoint worker of a node, child of its agent."""
    importlib.import_module("hpcrun.checkpoint.flush.worker").main(root)
    return EXIT_DONE


def _run_connectivity_step(interface: str) -> int:
    """The internal verb `_reach INTERFACE`: a node's part in trying which nodes reach each other."""
    from hpcrun.health.connectivity import run_connectivity_step

    run_connectivity_step(interface)
    return EXIT_DONE


_INTERNAL: dict[str, Callable[..., int]] = {
    "_rank": _run_rank,
    "_agent": _run_agent,
    "_task": _run_batch_task,
    "_call": _run_function_call,
    "_chaos": _execute_injection,
    "_beside": _run_sidecar,
    "_reach": _run_connectivity_step,
    "_checkpoint_worker": _run_checkpoint_worker,
    "_failover": _run_successor,
}
"""What we start ourselves."""


def _print_help() -> None:
    print("usage: hpcrun VERB ...\n\nDistributed training, from the laptop to the cluster.\n")
    width = max(map(len, VERBS))
    for name, verb in VERBS.items():
        print(f"  {name:{width}}  {verb.help}")
    print(
        "\n`hpcrun VERB --help` says more. Exit codes: 0 done, 1 a check failed, 2 usage or job file, 3 site,"
    )
    print("4 not a number, 5 ranks died, 75 saved (to be resumed), 130 interrupted.")


def _suggest_nearest(word: str) -> str:
    import difflib

    close = difflib.get_close_matches(word, VERBS, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _print_error(text: str) -> None:
    from hpcrun.cli.terminal import escape_control_characters

    text = escape_control_characters(text)
    # Where it cannot be said, the exit code still tells.
    with contextlib.suppress(OSError):
        sys.stderr.write("".join(f"hpcrun: {line}\n" for line in text.splitlines()))
