"""The health of a node's GPUs by nvidia-smi, and whether it keeps an attempt away from the node.

The action that the driver requests (gpu_recovery_action, driver 570 and later) takes precedence over our
reading of its counters. See NVIDIA's documentation of nvidia-smi, and of GPU memory error management.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.finding import Finding
from hpcrun.health.xids import Xid, XidAction, judge_xids

_FORMAT = "--format=csv,noheader,nounits"
_FIELDS = ("index", "uuid", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending")
_RECOVERY = "gpu_recovery_action"
_ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_LOST_GPU_MESSAGES = ("gpu is lost", "fallen off the bus", "reboot the system to recover")
_NO_ACTION = "none"
_ACTIONS = ("reset", "reboot", "drain p2p", "drain and reset", "gpu reset", "node reboot")


@dataclass(frozen=True)
class GpuHealth:
    """One GPU; None where nvidia-smi does not say."""

    index: str
    uuid: str
    uncorrected: int | None = None
    """ECC errors that could not be corrected since the driver was loaded."""
    retired_pending: bool | None = None
    recovery: str | None = None
    """The action that the driver requests; `None` in its own words if there is none."""
    rows_pending: bool | None = None
    rows_failed: bool | None = None


def parse_gpu_health(text: str) -> list[GpuHealth]:
    """Parse the lines of `nvidia-smi --query-gpu=…`, with the recovery action last if it was queried."""
    gpus = []
    for cells in _split_cells(text):
        if len(cells) in (len(_FIELDS), len(_FIELDS) + 1) and cells[0].isdigit():
            errors = int(cells[2]) if cells[2].isdigit() else None
            recovery = _parse_cell(cells[len(_FIELDS)]) if len(cells) > len(_FIELDS) else None
            gpus.append(GpuHealth(cells[0], cells[1], errors, _parse_flag(cells[3]), recovery))
    return gpus


def with_remapped_rows(gpus: Sequence[GpuHealth], text: str) -> list[GpuHealth]:
    """Add what `nvidia-smi --query-remapped-rows=…` reports to these GPUs."""
    cells_of = {cells[0]: cells for cells in _split_cells(text) if len(cells) == len(_ROWS)}
    flags = {uuid: (_parse_flag(cells[1]), _parse_flag(cells[2])) for uuid, cells in cells_of.items()}
    unknown = (None, None)
    return [
        replace(gpu, rows_pending=pending, rows_failed=failed)
        for gpu in gpus
        for pending, failed in [flags.get(gpu.uuid, unknown)]
    ]


def judge_gpus(gpus: Sequence[GpuHealth], requested: int) -> list[Finding]:
    """Check every GPU, and their number."""
    findings = [finding for gpu in gpus for finding in _judge_gpu(gpu)]
    if not gpus:
        findings.append(Finding("unknown", "gpu", "", "nvidia-smi names no GPU that is to be seen from here"))
    elif len(gpus) < requested:
        findings.append(
            Finding("error", "gpu", "", f"{len(gpus)} GPUs answer, and {requested} were asked for")
        )
    return findings


def _judge_gpu(gpu: GpuHealth) -> list[Finding]:
    who, wrong = f"GPU {gpu.index} ({gpu.uuid})", []
    action = gpu.recovery and gpu.recovery.casefold()
    if action in _ACTIONS:
        wrong.append(Finding("error", "gpu", who, f"the driver asks for: {gpu.recovery}"))
    elif action not in (None, _NO_ACTION):
        wrong.append(Finding("unknown", "gpu", who, f"the driver asks for: {gpu.recovery}"))
    if gpu.rows_failed:
        wrong.append(Finding("error", "gpu", who, "a row of its memory could not be remapped"))
    if gpu.rows_pending:
        wrong.append(Finding("error", "gpu", who, "rows of its memory are remapped at its next reset"))
    if gpu.retired_pending:
        wrong.append(Finding("error", "gpu", who, "pages of its memory are retired at its next reset"))
    if gpu.uncorrected and not wrong:
        text = f"{gpu.uncorrected} uncorrected memory errors since boot"
        wrong.append(Finding("warning", "gpu", who, text))
    return wrong


def check_gpu_health(
    requested: int, timeout_s: float, xids: Sequence[Xid] = (), site: Mapping[int, XidAction] | None = None
) -> list[Finding]:
    """Ask nvidia-smi, each question with this time limit; SiteError where it does not answer in time.

    `xids`: what the kernel's log has of the GPUs, judged by the site's list and the catalogue.
    """
    # Before driver 570 the last field is no valid one, and nothing is answered.
    for fields in ((*_FIELDS, _RECOVERY), _FIELDS):
        done = process.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", _FORMAT], timeout_s=timeout_s)
        words = " ".join(f"{done.stdout} {done.stderr}".split())
        if any(word in words.casefold() for word in _LOST_GPU_MESSAGES):
            return [Finding("error", "gpu", "", f"nvidia-smi: {words[:200]}")]
        if done.exit_code == 0:
            break
    else:
        return [
            Finding("unknown", "gpu", "", f"nvidia-smi ended with exit code {done.exit_code}: {words[:200]}")
        ]
    gpus = parse_gpu_health(done.stdout)
    try:
        query = ["nvidia-smi", f"--query-remapped-rows={','.join(_ROWS)}", _FORMAT]
        rows = process.run(query, timeout_s=timeout_s)
        gpus = with_remapped_rows(gpus, rows.stdout if rows.exit_code == 0 else "")
    except SiteError as error:
        return [*judge_gpus(gpus, requested), Finding("unknown", "gpu", "", str(error))]
    xid_findings = judge_xids(xids, site, is_asked=_is_action_asked(gpus))
    return [*judge_gpus(gpus, requested), *xid_findings]


def _is_action_asked(gpus: Sequence[GpuHealth]) -> bool | None:
    """Whether the driver requests an action; None if it is too old to say."""
    actions = [gpu.recovery.casefold() for gpu in gpus if gpu.recovery is not None]
    return any(action != _NO_ACTION for action in actions) if actions and len(actions) == len(gpus) else None


def _split_cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _parse_cell(cell: str) -> str | None:
    """None for what nvidia-smi writes where it has no value: [N/A], [Not Supported], N/A."""
    return None if cell.startswith("[") or cell.upper() == "N/A" or not cell else cell


def _parse_flag(cell: str) -> bool | None:
    return {"yes": True, "no": False, "1": True, "0": False}.get(cell.casefold())
