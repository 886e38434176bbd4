"""What sbatch and scontrol answer, wrapped by sites, on other clusters, and in trouble."""

from __future__ import annotations

import pytest

from hpcrun.slurm.answers import parse_sbatch_answer, parse_slurm_problem


@pytest.mark.parametrize(
    ("stdout", "job", "cluster"),
    [
        ("Submitted batch job 13\n", 13, ""),
        ("15\n", 15, ""),  # --parsable, or a site's wrapper (dask-jobqueue#209)
        ("75168975;clustername\n", 75168975, "clustername"),  # clusterfutures#24
        # the cluster was taken for the id (snakemake-executor-plugin-slurm#121)
        ("Submitted batch job 3969755 on cluster nautilus\n", 3969755, "nautilus"),
        ("Welcome! job 5 is in maintenance\n7 users are logged in\nSubmitted batch job 42\n", 42, ""),
        ("2026\nSubmitted batch job 42\nYou have 3 jobs\n", 42, ""),
        ("2026\n42\n", 42, ""),
        ("*** quota: 80 % ***\n42;south\n", 42, "south"),
    ],
)
def test_ids(stdout: str, job: int, cluster: str) -> None:
    found = parse_sbatch_answer(stdout)
    assert (found.job, found.cluster, found.trouble) == (job, cluster, None)


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", "busy"),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.", "busy"),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
            "unreachable",
        ),
        ("sbatch: error: Batch job submission failed: Invalid node name specified", "refused"),
        ("sbatch: error: Batch job submission failed: Something new", "refused"),
        ("sbatch: error: Something new", "unknown"),
        ("", "unknown"),
    ],
)
def test_trouble_is_told_verbatim(stderr: str, kind: str) -> None:
    found = parse_sbatch_answer("", stderr)
    assert found.job is None
    assert found.trouble is not None
    assert found.trouble.kind == kind
    assert found.trouble.text == (stderr or "sbatch printed nothing")


def test_an_id_counts_although_sbatch_complained() -> None:
    # errors mixed with accepted ids (sdsc-summer-institute-2019#55)
    found = parse_sbatch_answer(
        "Submitted batch job 9\n", "sbatch: error: Socket timed out on send/recv operation\n"
    )
    assert found.job == 9
    assert found.trouble is not None
    assert found.trouble.kind == "busy"


def test_words_of_a_wrapper_without_an_id_are_kept() -> None:
    found = parse_sbatch_answer("Please choose a project first\n", "")
    assert found.job is None
    assert found.trouble is not None
    assert found.trouble.text == "Please choose a project first"


def test_an_uneventful_answer_is_no_trouble() -> None:
    for text in ("", "\n", "Submitted batch job 3\n", "Two-factor authentication is on from Monday\n"):
        assert parse_slurm_problem(text) is None
