"""The faults that one can ask for are real: Slurm and the nodes' neighbours notice them."""

from __future__ import annotations

import pytest

from hpcrun.errors import SiteError
from tests.lab.cluster import SCRATCH, Lab, Node


def reaches(one: Node, other: Node) -> bool:
    """Whether other's slurmd can be connected to from one."""
    script = f"import socket; socket.create_connection(('{other.name}', 6818), timeout=2)"
    return one.run(["python", "-c", script]).exit_code == 0


def test_slurm_notices_a_node_without_power_while_others_go_on(lab: Lab) -> None:
    lab.run(["sbatch", "--parsable", "-wn01", "-o/dev/null", "--wrap=sleep 600"]).require_success()
    node = lab.node("n02")
    node.space.path("/dev/shm/old").write_text("x", encoding="utf-8")
    node.power_off()
    with pytest.raises(SiteError, match="n02 of the lab is powered off"):
        node.run(["true"])
    lab.wait_for_state([node], {"down*", "down"}, timeout_s=200)
    # Slurm itself may doubt a healthy node for a moment, when a dead one holds up its pings.
    going_on = ["squeue", "--noheader", "--format=%T %N"]
    lab.wait_until(lambda: lab.run(going_on).stdout.split() == ["RUNNING", "n01"], 60)
    shown = lab.run(["srun", "--label", "-N2", "-wn[03-04]", "hostname"]).require_success().stdout
    assert sorted(shown.splitlines()) == ["0: n03", "1: n04"]
    node.power_on()
    lab.wait_for_state([node], {"idle"})
    assert not node.space.path("/dev/shm/old").exists()
    assert lab.run(["srun", "-wn02", "hostname"]).require_success().stdout.strip() == "n02"


def test_a_cut_link_separates_a_living_node(lab: Lab) -> None:
    node, neighbour = lab.node("n06"), lab.node("n05")
    assert reaches(neighbour, node)
    node.cut_link()
    assert not reaches(neighbour, node)
    assert node.run(["hostname"]).require_success().stdout.strip() == "n06"
    node.restore_link()
    assert reaches(neighbour, node)


def test_a_stopped_node_stands_still_until_it_is_resumed(lab: Lab) -> None:
    node = lab.node("n07")
    shown = "cat $(dirname $(grep -lE '^slurmd(-wlm)?$' /proc/[0-9]*/comm))/stat | cut -d' ' -f3"
    assert node.run(["sh", "-c", shown]).require_success().stdout.strip() == "S"
    node.stop()
    assert node.run(["sh", "-c", shown]).require_success().stdout.strip() == "T"
    node.resume()
    assert node.run(["sh", "-c", shown]).require_success().stdout.strip() == "S"


def test_links_can_be_slowed(lab: Lab) -> None:
    lab.node("n08").slow_link(10)
    lab.slow_uplink(2, 20)
    show = ["tc", "qdisc", "show", "dev"]
    assert "rate 10Mbit" in lab.node("n08").run([*show, "eth0"]).require_success().stdout
    assert "rate 10Mbit" in lab.head.run([*show, "n08"]).require_success().stdout
    assert "rate 20Mbit" in lab.head.run([*show, "up2"]).require_success().stdout
    assert "rate 400Mbit" in lab.head.run([*show, "up1"]).require_success().stdout
    lab.mend()
    assert "rate 2Gbit" in lab.head.run([*show, "n08"]).require_success().stdout
    assert "rate 400Mbit" in lab.head.run([*show, "up2"]).require_success().stdout


def test_a_full_scratch_takes_no_more(lab: Lab) -> None:
    node, write = lab.node("n01"), ["sh", "-c", f"echo more > {SCRATCH}/more"]
    node.run(write).require_success()
    node.fill_scratch()
    assert "No space left on device" in node.run(["sh", "-c", f"cat /proc/self/stat > {SCRATCH}/new"]).stderr
    lab.node("n02").run(write).require_success()
    node.empty_scratch()
    node.run(write).require_success()
