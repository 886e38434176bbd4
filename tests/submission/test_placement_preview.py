"""The network now: which nodes count as free, and which do not though Slurm calls them idle."""

from __future__ import annotations

import pytest

from hpcrun.slurm.cluster_state import parse_cluster_answers
from hpcrun.submission.placement_preview import load_network

NODE = "NodeName={} CPUTot=8 RealMemory=64000 State={} Partitions=main{}\n"


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("IDLE", "free"),
        ("IDLE+RESERVED", "busy"),
        ("IDLE+COMPLETING", "busy"),
        ("IDLE+PLANNED", "busy"),
        ("IDLE+RESERVED+COMPLETING", "busy"),
        ("IDLE+CLOUD+POWERED_DOWN", "free"),
        ("IDLE+DYNAMIC_NORM", "free"),
        ("IDLE+MAINTENANCE+RESERVED", "out of service"),
        ("IDLE+DRAIN", "out of service"),
        ("IDLE*", "out of service"),
        ("MIXED", "busy"),
        ("ALLOCATED+COMPLETING", "busy"),
        ("IDLE+SOMETHING_NEW", "unknown"),
    ],
)
def test_a_node_is_free_where_slurm_gives_it_to_a_job_now(state: str, word: str) -> None:
    network = load_network(None, parse_cluster_answers({"nodes": NODE.format("n1", state, "")}))
    assert dict(network.states) == {"n1": word}


def test_nodes_of_the_job_s_own_reservation_are_free_to_it() -> None:
    nodes = NODE.format("n1", "IDLE+RESERVED", "\n   ReservationName=ours")
    nodes += NODE.format("n2", "IDLE+RESERVED", "\n   ReservationName=theirs")
    nodes += NODE.format("n3", "IDLE+RESERVED", "")
    live = parse_cluster_answers({"nodes": nodes})
    assert load_network(None, live).free == []
    assert load_network(None, live, reservation="ours").free == ["n1"]
