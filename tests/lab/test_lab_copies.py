"""A run without any parity loses a node, and goes on from what a spare has copied into its memory."""

from __future__ import annotations

import pytest

from tests.lab.desk import Desk, records, story
from tests.lab.test_lab_tiers import JOB, events, steps, stored


@pytest.mark.parametrize("which", ["a node", "the batch host"])
def test_what_a_lost_node_held_comes_out_of_a_spare_s_memory(desk: Desk, which: str) -> None:
    job = JOB.replace("parity: {scheme: xor}, replicate_to_spares: false", "parity: {scheme: none}")
    assert job != JOB
    (desk.path / "job.yaml").write_text(job)
    undisturbed = desk.undisturbed_losses()
    before = desk.shared_memory(node.name for node in desk.lab.nodes)
    run = desk.submit("job.yaml")

    def newest_copies() -> dict[str, set[str]]:
        """Of the newest save of which all spares have said what they hold: which nodes' parts, by spare."""
        found: dict[int, dict[str, set[str]]] = {}
        for line in events(run, "spare_replica"):
            found.setdefault(line["step"], {})[line["node"]] = {*line["of"]}
        whole = [step for step in found if step >= 10 and len(found[step]) == 4]
        return found[max(whole)] if whole else {}

    desk.until(lambda: bool(newest_copies()), run)
    first = records(run, "attempts/1/placement.json")[0]
    held = newest_copies()
    assert held.keys() == {*first["spares"]}
    assert set().union(*held.values()) == {*first["nodes"]}, story(run)
    # The first node has the batch shell and the supervisor: another one takes over.
    lost = first["nodes"][-1 if which == "a node" else 0]
    desk.lab.node(lost).power_off()
    assert desk.ended(run)["status"] == "done", story(run)
    (restored,) = events(run, "restore")
    assert (restored["tiers"], restored["rebuilt"], restored["from_spares"]) == (["memory"], 0, 1), story(run)
    assert restored["step"] >= 10
    assert bool(events(run, "failover")) == (which == "the batch host")
    second = records(run, "attempts/2/placement.json")[0]["nodes"]
    assert lost not in second
    assert (stored(run, "durable"), stored(run, "parity")) == ([60], [])
    assert steps(run) == undisturbed
    told = desk.hpcrun("events", run.id).stdout
    assert "holds what" in told
    assert "(memory); 1 part from spares' memory" in told
    assert "spares: copies of step" in desk.hpcrun("describe", run.id).stdout
    # The agents give the memory back when they leave, which is a moment after the end of the run.
    desk.until_none_is_left(run)
    for node, there in desk.shared_memory({*second, *first["spares"]}).items():
        assert there <= before[node], f"{node}\n{story(run)}\n{desk.lab.log('slurmctld')[-5000:]}"
