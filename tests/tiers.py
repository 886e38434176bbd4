"""What tests need: the markers of folders and files, and a guard against tests that need more than they say.

A test with none of these markers is `pure`: it runs in pytest's own process, without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path, PurePath

HERE = Path(__file__).parent
PURE = "pure"
TIERS = {
    "process": """
        bench chaos lab runtime checkpoint/test_commit.py checkpoint/test_durable_tier.py
        checkpoint/test_faults.py checkpoint/test_object_tier.py checkpoint/test_objects.py
        checkpoint/test_peer_service.py checkpoint/test_spare_replicas.py checkpoint/test_storage.py
        checkpoint/test_worker.py cli/test_branch.py cli/test_cluster_verbs.py cli/test_data_verbs.py
        cli/test_doctor_verb.py cli/test_events_verbs.py cli/test_older_runs.py cli/test_runs_verbs.py
        cli/test_safety.py cli/test_submit_verb.py cli/test_surroundings.py cli/test_train_verb.py
        launch/test_admission.py launch/test_agent_pool.py launch/test_batch_task.py
        launch/test_checkpointing.py launch/test_coordinator.py launch/test_elastic_plan.py
        launch/test_fault_cases.py launch/test_half_runs.py launch/test_io_retry.py
        launch/test_lost_early.py launch/test_ports.py launch/test_predecessors.py
        launch/test_rank_command.py launch/test_slow.py launch/test_spare_replicas.py
        launch/test_supervisor.py launch/test_supervisor_restart.py launch/test_watching.py
        runs/test_postmortem.py runs/test_requests.py runs/test_run_state.py
        security/test_foreign_states.py security/test_listeners.py security/test_safe_path.py
        security/test_shared_places.py security/test_template_values.py security/test_whose_run.py
        slurm/test_allocation.py slurm/test_executor.py slurm/test_inputs.py slurm/test_queue.py
        slurm/test_sbatch.py slurm/test_template_contract.py slurm/test_template_scripts.py submission
        telemetry/test_hooks.py telemetry/test_sidecar.py test_address.py test_login_imports.py
        test_public_face.py test_process.py
        """,
    "torch": """
        checkpoint/test_faults.py cli/test_older_runs.py launch/test_slow.py runtime
        security/test_foreign_states.py test_public_face.py
        """,
    "mpi": """
        bench/test_pingpong.py chaos/test_inject.py checkpoint/test_faults.py lab/test_lab_openmpi.py
        launch/test_admission.py launch/test_batch_task.py launch/test_elastic_plan.py
        launch/test_fault_cases.py launch/test_half_runs.py launch/test_io_retry.py
        launch/test_lost_early.py launch/test_ports.py launch/test_slow.py launch/test_spare_replicas.py
        launch/test_supervisor.py launch/test_supervisor_restart.py launch/test_watching.py
        runtime/test_async_checkpoint_world.py runtime/test_collective_verbs.py
        runtime/test_direct_checkpoint.py runtime/test_parity.py runtime/test_placement_check.py
        runtime/test_state_tree.py runtime/test_training.py runtime/test_training_behind.py
        runtime/test_uneven.py telemetry/test_sidecar.py
        """,
    "s3": "checkpoint/test_object_tier.py checkpoint/test_objects.py",
    "lab": "lab",
}
"""Marker to the folders and files of tests/ that get it; other tests have it as a decorator."""

_STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"}
_PACKAGES = {"torch": "torch", "mpi4py": "mpi", "moto": "s3", "s3fs": "s3"}


def tiers_of(path: PurePath) -> frozenset[str]:
    """The markers that a file of tests gets by its place."""
    places = {str(place) for place in (path.relative_to(HERE), *path.relative_to(HERE).parents)}
    return frozenset(tier for tier, listed in TIERS.items() if places & {*listed.split()})


class TierGuard:
    """Notes what a test, or the import of its module, does without the marker for it."""

    def __init__(self) -> None:
        self._allowed = frozenset(TIERS)
        self._problems: list[str] = []
        self._pid = os.getpid()
        sys.addaudithook(self._audit)

    def watch(self, tiers: Iterable[str]) -> None:
        """From now on allow what these markers stand for."""
        self._allowed = frozenset(tiers)

    def problems(self) -> list[str]:
        """What has been done without its marker since the last call; from now on all is allowed."""
        problems, self._problems, self._allowed = self._problems, [], frozenset(TIERS)
        return problems

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "import":
            package = str(arguments[0]).partition(".")[0]
            # Another test may have imported it already: only what loads none of them is held to it.
            if package in _PACKAGES and "process" not in self._allowed:
                self._need(_PACKAGES[package], f"imports {package}")
        elif event in _STARTS:
            self._need("process", f"starts {arguments[0] if arguments else 'a process'}")
            if arguments and PurePath(str(arguments[0])).name == "mpiexec":
                self._need("mpi", "starts ranks with mpiexec")

    def _need(self, tier: str, deed: str) -> None:
        if tier not in self._allowed and os.getpid() == self._pid:
            self._problems.append(f"{deed} without the marker {tier}: see tests/tiers.py")
