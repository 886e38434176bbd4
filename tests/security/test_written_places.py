"""Every place in the source that writes, makes, renames or removes a file is known, and why it is safe there.

Outside of the run directory other users may take names. A call that is not in the table fails here:
decide where it writes, and put it there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "hpcrun"
WRITERS = {
    *("unlink", "rmdir", "rmtree", "remove", "removedirs", "mkdir", "makedirs", "mkfifo", "mknod", "mkdtemp"),
    *("rename", "renames", "link", "symlink", "hardlink_to", "symlink_to", "touch", "truncate", "ftruncate"),
    *(
        "write_text",
        "write_bytes",
        "write_whole",
        "write_json",
        "write_output",
        "open_output",
        "open_multiuser",
    ),
    *("mkstemp", "TemporaryFile", "NamedTemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile"),
    *("copy", "copy2", "copyfile", "copytree", "move", "chmod", "chown", "lchown", "utime"),
    *("LineWriter", "make_directories", "AsideFile", "remove_tree", "remove_empty", "EventFileWriter"),
    *(
        "export_chrome_trace",
        "FileSystemWriter",
        "move_temporary_file",
        "append_line",
        "write_private",
        "open_for_append",
    ),
}
"""Names of calls that write; `replace`, `open` and `os.open` are looked at more closely."""
KNOWN = {
    "an output that the user has named, checked by `check_output`, or a directory made aside": {
        "bench/pingpong": "main",
        "checkpoint/objects/store": "Store._put",
        "checkpoint/restore/exchange": "_copy written_aside",
        "cli/ckpt_exchange": "_export_hpcrun",
        "cli/cluster": "_write",
        "cli/doctor": "_count",
        "cli/fabric": "_draw",
        "cli/lemons": "drain",
        "cli/metrics": "metrics",
        "cli/template": "export",
        "cli/tune_predict": "_draw",
        "launch/outlets/sinks": "TensorBoard.__init__",
        "launch/record/postmortem": "postmortem",
        "runtime/export": "export_dcp",
        "specs/sha256sums": "write_sums",
        "runtime/hf": "_Shard.__init__ _finish _write_json _write_tensors",
        "specs/prepare": "_aside prepare",
        "tuning/policy_entry": "append_row",
    },
    "run directory": {
        "checkpoint/commit": "begin commit discard making_way remove remove_leftovers set_aside",
        "checkpoint/drain/durable": (
            "DurableStation._commit DurableStation._give_up DurableStation._write "
            "DurableStation.abandon DurableStation.store _unlink prove_writable"
        ),
        "checkpoint/lustre/direct": "write_file_direct",
        "checkpoint/lustre/storage": "Storage._create Storage.retry_file",
        "checkpoint/objects/download": "_fetch_file download",
        "checkpoint/restore/exchange": "copy_in",
        "checkpoint/restore/repair": "_Work._place_file _Work.commit",
        "checkpoint/write": "open_shared write_file",
        "checkpoint/writer": "Lease._keep Lease._take Lease.release _write",
        "cli/ckpt_exchange": "_import_new",
        "runtime/script_line": "ScriptLineage._claim",
        "launch/call": "_write_private",
        "launch/task": "_await_private_pickle",
        "launch/agents/agent": "Agent._redirect_log Agent._start",
        "launch/agents/comeback": "LocalRecovery._ended",
        "launch/agents/crew": "AgentPool.__init__ AgentPool._launch",
        "launch/agents/heir": "SuccessorProcess._give_up SuccessorProcess._start",
        "launch/agents/lease": "LeaderRecord.publish Leadership.renew claim_epoch write_lease_probe",
        "launch/agents/succession": "FailoverState._tell",
        "launch/agents/takeover": "run_failover",
        "launch/closing": "OutcomeRecorder.attempt record_run_exit",
        "launch/command": "rank_command",
        "launch/launchers": "MpirunLauncher.start _start_launcher",
        "launch/outlets/beside": "_Keeper._start",
        "launch/outlets/exporter": "Exporter._serve Exporter._write Exporter.close",
        "launch/outlets/heard": "Heard.show",
        "launch/outlets/hooks": "Hooks.turn",
        "launch/outlets/sinks": "TensorBoard.turn Wandb.turn",
        "launch/outlets/telemetry": "_start",
        "launch/ownership": "hold_lock_file take_over_run_lock",
        "launch/record/cancel": "_record cancel",
        "launch/rehearsal/chaos": "Strike._record",
        "launch/settings": "choose_comm_settings",
        "launch/shim": "_redirect_output enter_rank exit_at_stop.leave record_shared_memory report_error",
        "launch/submit/snapshot": "record_origin",
        "launch/submit/submission": "_directory _fill _fill_elements _hand_over _put_back",
        "launch/supervisor": "Supervisor._new_run Supervisor._open.furnish Supervisor._run_attempt",
        "launch/vault/host": "WorkerProcess._start",
        "launch/vault/keeper": "CheckpointCoordinator._write",
        "launch/vault/poison": "record_failed_restart",
        "launch/watch/probe": "_run_py_spy _trigger_nccl_dump",
        "launch/watch/progress": "_register_stack_dump",
        "runtime/loop": "Trainer.__init__",
        "runtime/planned": "_record_unrestored",
        "runtime/profile": "StepProfiler._finish",
        "runtime/rank": "_open_run _train",
        "slurm/executor": (
            "BackgroundExecutor._internal_process_submissions BackgroundExecutor._submit_command "
            "TemplateExecutor._send dump_private place write_private"
        ),
        "specs/attempt": "Attempt.create",
        "specs/base_model": "_copy_file _kept",
        "specs/branch": "_forget_processes _note_end _unshare",
        "specs/identity": "write_identity",
        "specs/placement": "write_placement",
        "specs/predecessors": "write_predecessors",
        "specs/provenance": "write_provenance",
        "specs/records": "LineWriter.__init__ write_json write_whole",
        "specs/rundir": "create_run new_run",
        "specs/settings": "write_settings",
        "specs/sweep": "write_sweep",
    },
    "a Folder: each level proved ours, no links followed, held by its descriptor": {
        "checkpoint/drain/arena": (
            "Arena._drop Arena._make Arena._make_all Slot.empty Slot.hold _reopen make_folder remove_folder"
        ),
        "checkpoint/drain/guests": "Guests.__init__ Guests._copy_part Guests._drop",
        "checkpoint/drain/lines": "listen",
        "checkpoint/drain/local": (
            "LocalStation._made LocalStation._store LocalStation.prove LocalStation.retain"
        ),
        "checkpoint/drain/stale_memory": "clean_up",
        "checkpoint/drain/worker": "Worker._close",
        "checkpoint/parity/blocks": "remove_files remove_leftovers write_holding",
        "checkpoint/parity/files": "AsideFile.__init__ AsideFile.close AsideFile.put_in_place",
        "checkpoint/parity/rebuild": "_Again._make",
        "checkpoint/parity/station": "ParityStation._encode ParityStation._go_through ParityStation.store",
        "files": (
            "OwnedDirectory.folder OwnedDirectory.remove_empty OwnedDirectory.remove_tree "
            "OwnedDirectory.rename OwnedDirectory.unlink "
            "OwnedDirectory.write_whole make_directories open_for_append open_output "
            "read_filesystem_clock write_output"
        ),
        "launch/health/probes": "_new_file",
        "launch/outlets/shown": "ShownFile.remove ShownFile.write remove_stale",
        "launch/shm": "_unlink",
    },
    "a slot of memory, whose path its worker has told, proved by its descriptor": {
        "checkpoint/drain/arena": "map_slot",
        "runtime/snapshot": "_map_slot",
    },
    "a directory of ours with a random name, which tempfile makes": {
        "cli/ckpt_repair": "made_again",
        "slurm/contract": "_ask_sbatch",
        "slurm/syntax": "syntax_error",
    },
    "nothing on disk": {
        "here": "open_missing_descriptors",
    },
    "lists of the site or of the user in their configuration directories": {
        "launch/health/lemons": "_append_locked append_sightings.write",
        "specs/badnodes": "add_bad_node append_line",
    },
    "a file without a name": {
        "launch/rehearsal/filler": "Filler.__init__",
        "process": "run_with_input",
    },
}
"""What makes a place safe, and which functions of which modules write there."""
_WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}


def calls(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str]]:
    """Which function calls what that writes."""
    for node in ast.iter_child_nodes(tree):
        name = owner
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{owner}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and (verb := writes(node)):
            yield owner, verb
        yield from calls(node, name)


def writes(call: ast.Call) -> str:
    """How a call writes, as far as its words tell; empty where it does not."""
    if isinstance(call.func, ast.Attribute):
        name, on = call.func.attr, ast.unparse(call.func.value)
    elif isinstance(call.func, ast.Name):
        name, on = call.func.id, ""
    else:
        return ""
    words = [ast.unparse(one) for one in (*call.args, *(word.value for word in call.keywords))]
    if name == "open":
        modes = [one for one in words if one.startswith("'") and set(one.strip("'")) <= set("rwxab+t")]
        opens = any(set(mode) & set("wxa+") for mode in modes)
        is_flagged = any(flag in " ".join(words) for flag in _WRITING_FLAGS) or "flags" in words
        return f"{on}.open" if opens or is_flagged else ""
    if name == "replace":  # of texts and dataclasses there are many
        is_path = len(call.args) == 1 and not call.keywords
        return "replace" if on == "os" or (is_path and on not in ("", "dataclasses")) else ""
    if name in ("copy", "move", "remove") and on not in ("os", "shutil"):
        return ""
    return name if name in WRITERS else ""


def found() -> dict[str, set[str]]:
    """The functions that write, by module."""
    places: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        module = str(path.relative_to(ROOT)).removesuffix(".py")
        for function, _ in calls(ast.parse(path.read_text(encoding="utf-8"))):
            places.setdefault(module, set()).add(function)
    return places


def test_every_place_that_is_written_is_known() -> None:
    known: dict[str, set[str]] = {}
    for modules in KNOWN.values():
        for module, functions in modules.items():
            assert not known.get(module, set()) & set(functions.split()), f"{module}: is in the table twice"
            known.setdefault(module, set()).update(functions.split())
    there = found()
    new = {f"{module}: {one}" for module, ones in there.items() for one in ones - known.get(module, set())}
    gone = {f"{module}: {one}" for module, ones in known.items() for one in ones - there.get(module, set())}
    assert not new, f"write somewhere, and are not in the table: {sorted(new)}"
    assert not gone, f"are in the table, and write nothing any more: {sorted(gone)}"


def test_the_walk_sees_the_ways_to_write() -> None:
    ways = """
def f(path, flags, run):
    path.unlink(); shutil.rmtree(path); os.replace("a", "b"); path.replace(other); tempfile.mkstemp()
    open(path, "w"); path.open("ab"); os.open(path, os.O_WRONLY); os.open(path, flags); os.remove(path)
    write_json(path, {}); folder.write_whole("x", b""); os.makedirs(p); p.write_bytes(b""); os.rename(1, 2)
"""
    lines = [verb for _, verb in calls(ast.parse(ways))]
    assert len(lines) == 15
    reads = (
        'text.replace("a", "b"); dataclasses.replace(x, a=1); open(p); p.open("rb"); os.open(p, os.O_RDONLY)'
    )
    assert not list(calls(ast.parse(reads)))
