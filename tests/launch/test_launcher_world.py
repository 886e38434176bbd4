"""Which environments make a process a rank, against what launchers leave behind (tests/data/worlds.txt)."""

from pathlib import Path

import pytest

from hpcrun.launcher_world import World, detect_world, without_rank_variables

CAPTURED = Path(__file__).parents[1] / "data" / "worlds.txt"


def environments() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in CAPTURED.read_text().splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = current = {}
        elif "=" in line:
            name, _, value = line.partition("=")
            current[name] = value
    return found


ENVIRONMENTS = environments()

EXPECTED = {
    "hydra: mpiexec -n 2, second rank": World("hydra", 1, 2, 1, 2),
    "hydra in an allocation: salloc, then mpiexec over two nodes, rank 3": World("hydra", 3, 4, 1, 2),
    "hydra from a shell of srun --pty: the shell's step is not ours": World("hydra", 0, 2, 0, 2),
    "open mpi: mpirun -n 3, second rank": World("openmpi", 1, 3, 1, 3),
    "torchrun: second of two on the second node": World("torchrun", 3, 4, 1, 2),
    "torchrun in a slurm step: one task a node": World("torchrun", 2, 4, 0, 2),
    "srun --mpi=pmi2: a step narrower than the allocation": World("slurm", 1, 2, 1, None),
    "srun --mpi=pmix": World("slurm", 3, 4, 1, None),
    "another launcher that speaks pmi": World("pmi", 5, 8, 1, 4),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_world_of_every_captured_environment(name: str) -> None:
    world = detect_world(ENVIRONMENTS[name])
    assert world == (None if name.startswith("none:") else EXPECTED[name])


def test_a_step_of_which_we_hold_the_terminal_is_a_shell() -> None:
    step = ENVIRONMENTS["srun --mpi=pmix"]
    assert detect_world(step, stdin_is_tty=True) is None
    mpiexec = ENVIRONMENTS["hydra: mpiexec -n 2, second rank"]
    assert detect_world(mpiexec, stdin_is_tty=True) is not None


def test_the_count_of_the_step_wins_over_that_of_the_allocation() -> None:
    step = ENVIRONMENTS["srun --mpi=pmi2: a step narrower than the allocation"]
    world = detect_world(step | {"SLURM_NTASKS": "4"})
    assert world is not None
    assert world.size == 2


@pytest.mark.parametrize("size", ["", "0", "1", "two", "-4"])
def test_numbers_that_make_no_sense_make_no_world(size: str) -> None:
    environ = ENVIRONMENTS["hydra: mpiexec -n 2, second rank"] | {"PMI_SIZE": size}
    assert detect_world(environ) is None


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if not name.startswith("none:")])
def test_nothing_of_an_outer_world_reaches_a_world_of_our_own(name: str) -> None:
    cleaned = without_rank_variables(ENVIRONMENTS[name] | {"PATH": "/bin", "SLURM_JOB_ID": "13"})
    assert detect_world(cleaned) is None
    assert cleaned["PATH"] == "/bin"
    assert cleaned["SLURM_JOB_ID"] == "13", "which allocation we are in stays known"
    ours = ENVIRONMENTS["hydra: mpiexec -n 2, second rank"]
    assert detect_world(cleaned | ours) == EXPECTED["hydra: mpiexec -n 2, second rank"]
