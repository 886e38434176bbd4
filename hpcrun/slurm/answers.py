"""What sbatch, scontrol and scancel answer: the id, the estimate, or what went wrong and what to do about it.

Slurm's exit codes say little (some failures exit with 0), so answers are judged by text. No parser raises.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

SlurmProblemKind = Literal[
    "busy",
    "no-job",
    "no-accounting",
    "database-down",
    "pending",
    "ended",
    "unreachable",
    "refused",
    "unknown",
]
"""busy: it may work later, or have worked already · no-job: no such job (any more) · no-accounting: this
cluster keeps no accounts · database-down: it does, but the database does not answer · pending: the job waits
already · ended: the job is over · unreachable: no controller, no credential · refused: the request is not
accepted · unknown: no message that is known here."""

_LABELLED = re.compile(
    r"^(?:\w+: )?(?:(?:error|fatal): |slurm_\w+ error: )|: (?:unrecognized|invalid) option", re.I
)

_LOOK_FIRST = "look whether the job exists before submitting again"
_PROBLEMS: dict[SlurmProblemKind, dict[str, str]] = {
    "busy": {
        r"Socket timed out": _LOOK_FIRST,
        r"temporarily unable to accept job": _LOOK_FIRST,
        r"Resource temporarily unavailable": _LOOK_FIRST,
        r"Zero Bytes were transmitted or received": _LOOK_FIRST,
    },
    "no-accounting": {r"accounting storage is disabled": "this cluster keeps no accounts"},
    "database-down": {
        r"talking to the database|[Ss]lurmdbd|[Pp]ersist(?:ent connection|_conn|Init)|Database is busy": (
            "the accounting database does not answer"
        ),
    },
    "unreachable": {
        r"Unable to contact slurm controller|Connection refused": "the controller does not answer",
        r"Munge (?:en|de)code|[Aa]uthentication error": "authentication fails; ask an administrator",
        r"establish a configuration source|resolve_ctls": "no Slurm configuration is found here",
    },
    "pending": {r"Job is pending execution": "it waits already; there is nothing more to do"},
    "ended": {r"already completing or completed": "the job is over"},
    "no-job": {r"Invalid job id specified": "Slurm does not know it (any more)"},
    "refused": {
        r"Invalid node name specified": "a node that the job names does not exist; drop it from the list",
        r"Invalid hostlist": "this release does not read that host list; write the names out",
        r"Invalid --mem specification": "write whole numbers with K, M, G or T",
        r"Invalid --time specification": "write H:M:S, D-H:M:S or minutes",
        r"Invalid --exclusive specification": "write user, mcs or topo behind --exclusive, or nothing",
        r"Invalid job array specification": "the highest index is one below MaxArraySize",
        r"DOS line breaks": "save the script with UNIX line breaks",
        r"does not look like a batch script": "begin the script with #!/bin/bash",
        r"unrecognized option|invalid option": "this release of Slurm does not have that option",
        r"[Ii]nvalid partition": "`sinfo` lists the partitions",
        r"[Ii]nvalid account": "`sacctmgr show assoc user=$USER` lists what you may use",
        r"Requested topology configuration is not": "the segment must divide the number of nodes",
        r"Requested node configuration is not": "no node has what the job asks for",
        r"Requested time limit is invalid": "the partition allows less time",
        r"violates accounting/QOS policy": "the account or the QOS allows less, or too many jobs wait",
        r"[Ii]nvalid generic resource": "`scontrol show node` lists under Gres what there is",
        r"Access/permission denied": "you may not do this",
        r"operation is presently disabled": "the site has switched this off",
        r"Batch job submission failed|allocation failure": "the job was not accepted",
    },
}
"""By kind, what a message holds and what to do about it; the first that fits counts."""


class SlurmProblem(NamedTuple):
    """What went wrong: its kind, Slurm's own words, and what to do."""

    kind: SlurmProblemKind
    text: str
    remedy: str = ""


def parse_slurm_problem(text: str) -> SlurmProblem | None:
    """Return the problem that a command's output reports; None if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    output = " / ".join(lines)
    for kind, messages in _PROBLEMS.items():
        for pattern, remedy in messages.items():
            if re.search(pattern, output):
                return SlurmProblem(kind, output, remedy)
    return SlurmProblem("unknown", output) if any(_LABELLED.search(line) for line in lines) else None


class SbatchAnswer(NamedTuple):
    """What sbatch answered: the job's id and cluster, or the problem."""

    job: int | None
    cluster: str = ""
    trouble: SlurmProblem | None = None


_SUBMITTED = re.compile(
    r"(?:sbatch: )?Submitted batch job (?P<job>[0-9]{1,10})(?: on cluster (?P<cluster>[\w.-]+))?", re.ASCII
)
_PARSABLE = re.compile(r"(?P<job>[0-9]{1,10})(?:;(?P<cluster>[\w.-]+))?", re.ASCII)


def parse_sbatch_answer(stdout: str, stderr: str = "") -> SbatchAnswer:
    """Parse the id from sbatch's answer: its sentence, `--parsable` output, or a wrapper's number.

    Only whole lines count, and the last of them: a site's banner may mention other jobs. A problem on stderr
    is returned along with an id, because sbatch may complain and still submit.
    """
    trouble = parse_slurm_problem(stderr)
    lines = [line.strip() for line in stdout.splitlines()]
    for form in (_SUBMITTED, _PARSABLE):
        matches = [match for line in lines if (match := form.fullmatch(line))]
        if matches:
            return SbatchAnswer(int(matches[-1]["job"]), matches[-1]["cluster"] or "", trouble)
    words = " / ".join(line.strip() for line in f"{stderr}\n{stdout}".splitlines() if line.strip())
    problem = trouble or parse_slurm_problem(stdout)
    return SbatchAnswer(None, trouble=problem or SlurmProblem("unknown", words or "sbatch printed nothing"))
