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
        "write_atomically",
        "write_json",
        "write_output",
        "open_output",
        "open_multiuser",
    ),
    *("mkstemp", "TemporaryFile", "NamedTemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile"),
    *("copy", "copy2", "copyfile", "copytree", "move", "chmod", "chown", "lchown", "utime"),
    *(
        "JsonLineWriter",
        "EventWriter",
        "make_directories",
        "AtomicFile",
        "remove_tree",
        "remove_empty",
        "EventFileWriter",
    ),
    *(
        "export_chrome_trace",
        "FileSystemWriter",
        "move_temporary_file",
        "append_synced_lines",
        "write_private_file",
        "open_for_append",
    ),
}
"""Names of calls that write; `replace`, `open` and `os.open` are looked at more closely."""
KNOWN = {
    "an output that the user has named, checked by `check_output`, or a directory made aside": {
        "bench/pingpong": "main",
        "checkpoint/objects/store": "ObjectStore._put",
        "checkpoint/restore/exchange": "_copy_synced atomic_directory export_generation",
        "cli/doctor": "_check_counters",
        "cli/metrics": "metrics",
        "cli/output": "write_file",
        "telemetry/trackers": "TensorBoard.__init__",
        "runs/postmortem": "write_postmortem",
        "runtime/export": "export_dcp",
        "specs/sha256sums": "write_sha256sums",
        "runtime/hf_weights": "_Shard.__init__ _finish _write_json _write_tensors",
        "data/tokenize": "_atomic_file tokenize_files",
        "tuning/policy/entry": "append_policy_row",
    },
    "run directory": {
        "checkpoint/commit": (
            "begin_generation commit_generation discard_draft replacing_generation "
            "delete_generation remove_unfinished_saves quarantine_generation"
        ),
        "checkpoint/flush/durable_tier": (
            "DurableTier._commit DurableTier._give_up DurableTier._write "
            "DurableTier.abandon DurableTier.store _unlink check_writable"
        ),
        "checkpoint/lustre/direct": "write_file_direct",
        "checkpoint/lustre/storage": "CheckpointStorage._create CheckpointStorage.retry_file",
        "checkpoint/objects/download": "_fetch_file download_copy",
        "checkpoint/restore/exchange": "copy_generation_in",
        "checkpoint/restore/repair": "_GenerationRepair._place_file _GenerationRepair.commit",
        "checkpoint/part_writer": "open_shared_file write_synced_file",
        "checkpoint/writer_lease": (
            "WriterLease._keep WriterLease._take WriterLease.release _write_writer_record"
        ),
        "cli/ckpt_exchange": "_import_into_new_run",
        "runtime/script_lineage": "ScriptLineage._claim",
        "submission/function_call": "_write_private",
        "launch/batch_task": "_await_private_pickle",
        "launch/agents/agent": "Agent._redirect_log Agent._start",
        "launch/failover/local_recovery": "LocalRecovery._ended",
        "launch/agents/agent_pool": "AgentPool.__init__ AgentPool._launch",
        "launch/failover/successor_process": "SuccessorProcess._give_up SuccessorProcess._start",
        "runs/lease": "LeaderRecord.publish Leadership.renew claim_epoch write_lease_probe",
        "launch/failover/state": "FailoverState._tell",
        "launch/failover/failover_main": "run_failover",
        "launch/outcome": "OutcomeRecorder.attempt record_run_exit",
        "launch/rank_command": "rank_command",
        "launch/launchers": "MpirunLauncher.start _start_launcher",
        "telemetry/sidecar": "_SidecarManager._start",
        "telemetry/prometheus_exporter": "Exporter._serve Exporter._write Exporter.close",
        "runs/heartbeat_age": "HeartbeatAgeFile.show",
        "telemetry/hooks": "Hooks.turn",
        "telemetry/trackers": "TensorBoard.turn Wandb.turn",
        "launch/telemetry_session": "_start_sidecars",
        "runs/run_lock": "hold_lock_file take_over_run_lock",
        "runs/cancel": "_record_cancellation cancel_run",
        "chaos/inject": "Injection._record",
        "launch/comm_settings": "choose_comm_settings",
        "launch/rank_shim": "_redirect_output enter_rank exit_at_stop.leave record_shared_memory",
        "specs/origin": "record_provenance",
        "submission/submit": (
            "_make_run_directory _write_run_files _write_element_files _submit_to_slurm _restore_files"
        ),
        "launch/supervisor": "Supervisor._new_run Supervisor._open.furnish Supervisor._run_attempt",
        "launch/agents/worker_process": "WorkerProcess._start",
        "launch/checkpointing/coordinator": "CheckpointCoordinator._write",
        "launch/checkpointing/suspect_saves": "record_failed_restart",
        "launch/watch/hang_probe": "_run_py_spy _trigger_nccl_dump",
        "launch/watch/progress": "_register_stack_dump",
        "runtime/loop": "Trainer.__init__",
        "runtime/restore": "_record_unrestored",
        "runtime/profiler": "StepProfiler._finish",
        "runtime/rank": "_open_run _train",
        "slurm/executor": (
            "TemplateExecutor._send _start_controller dump_private_pickle link_or_copy submit_background "
            "write_private_file"
        ),
        "specs/base_model": "_copy_file _keep_files",
        "specs/branch": "_remove_process_files _record_end _break_hard_link",
        "specs/identity": "write_run_identity",
        "specs/placement": "write_placement",
        "specs/predecessors": "write_predecessors",
        "specs/provenance": "write_provenance",
        "specs/rank_error": "report_error",
        "specs/records": "JsonLineWriter.__init__ write_json write_atomically",
        "specs/rundir": "Attempt.create",
        "specs/run_lookup": "create_run new_run",
        "specs/settings": "write_comm_settings",
        "specs/sweep": "write_sweep",
    },
    "a Folder: each level proved ours, no links followed, held by its descriptor": {
        "checkpoint/flush/arena": (
            "Arena._drop Arena._make Arena._make_slots ArenaSlot.empty ArenaSlot.hold _reopen_slot "
            "make_arena_folder remove_arena_folder"
        ),
        "checkpoint/flush/spare_replicas": (
            "SpareReplicaStore.__init__ SpareReplicaStore._copy_part SpareReplicaStore._drop"
        ),
        "messages/lines": "listen_unix_socket",
        "checkpoint/flush/local_tier": ("LocalTier._made LocalTier._store LocalTier.prove LocalTier.retain"),
        "checkpoint/flush/stale_memory": "clean_up_stale_memory",
        "checkpoint/flush/worker": "CheckpointWorker._close",
        "checkpoint/parity/blocks": "remove_parity_files remove_unfinished_parity write_inventory_entry",
        "checkpoint/parity/files": "AtomicFile.__init__ AtomicFile.close AtomicFile.put_in_place",
        "checkpoint/parity/rebuild": "_BlockRebuilder._make",
        "checkpoint/parity/parity_tier": "ParityTier._encode ParityTier._run_round ParityTier.store",
        "files": (
            "OwnedDirectory.folder OwnedDirectory.remove_empty OwnedDirectory.remove_tree "
            "OwnedDirectory.rename OwnedDirectory.unlink "
            "OwnedDirectory.write_whole make_directories open_for_append open_output "
            "read_filesystem_clock write_output"
        ),
        "health/probes": "_new_file",
        "telemetry/shared_files": "SharedFile.remove SharedFile.write remove_stale_files",
        "shm_segments": "_unlink",
    },
    "a slot of memory, whose path its worker has told, proved by its descriptor": {
        "checkpoint/flush/arena": "map_slot",
        "runtime/snapshot": "_map_slot",
    },
    "a directory of ours with a random name, which tempfile makes": {
        "checkpoint/restore/run_repair": "RunRepair._rebuild",
        "slurm/contract": "_check_with_sbatch",
        "slurm/syntax": "find_bash_syntax_error",
    },
    "nothing on disk": {
        "local_identity": "open_missing_descriptors",
    },
    "lists of the site or of the user in their configuration directories": {
        "health/lemon_nodes": "_append_locked append_node_faults.write",
        "specs/badnodes": "add_bad_node append_synced_lines",
    },
    "a file without a name": {
        "chaos/disk_filler": "DiskFiller.__init__",
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
