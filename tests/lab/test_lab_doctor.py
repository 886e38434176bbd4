"""The doctor on the nodes of a real allocation, and settings in the ranks of a real job."""

from __future__ import annotations

import json

import pytest

from tests.lab.desk import Desk, records, story

PORT = {
    "device": "mlx5_0", "number": 1, "state": "ACTIVE", "physical": "LinkUp", "rate_Gbps": 400.0,
    "layer": "InfiniBand", "gids": [], "interfaces": [], "traffic_class": None,
}  # fmt: skip
OTHER = PORT | {"device": "mlx5_1"}
SAY = 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $NCCL_IB_HCA $NCCL_IB_TC"'


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_ranks_get_the_settings_and_each_node_its_own(desk: Desk, launcher: str) -> None:
    reports = desk.path / "hosts.json"
    ports = {"n01": [PORT, OTHER], "n02": [PORT, OTHER | {"state": "DOWN"}]}
    reports.write_text(json.dumps({"nodes": [{"node": node, "ports": of} for node, of in ports.items()]}))
    network = f"interface: eth0, hcas: [mlx5_0, mlx5_1], traffic_class: 106, reports: {reports}"
    desk.profile(f"mpi: {{launcher: {launcher}}}\nnetwork: {{{network}}}\n")
    words = ("name=own", "resources.nodes=2", "preflight=[nic]", "env.NCCL_IB_TC='96'", "--", "sh", "-c", SAY)
    run = desk.submit(*words)
    assert desk.ended(run)["status"] == "done", story(run)
    logs = [run.attempt(1).log(rank).read_text().strip() for rank in (0, 1)]
    assert logs == ["eth0 =eth0 =mlx5_0,mlx5_1 96", "eth0 =eth0 =mlx5_0 96"]
    (settings,) = records(run, "attempts/1/settings.json")
    assert [one["name"] for one in settings["overruled"]] == ["NCCL_IB_TC"]


def test_every_node_of_an_allocation_is_looked_at(desk: Desk) -> None:
    desk.profile("network: {interface: eth0}\n")
    done = desk.hpcrun("doctor", "--all", "--json", before=("salloc", "-N3", "--mem=1G"), code=None)
    found = json.loads(done.stdout)
    assert [one["node"] for one in found["nodes"]] == ["n01", "n02", "n03"]
    for one in found["nodes"]:
        addresses = {face["name"]: face["networks"] for face in one["interfaces"]}
        assert (one["socket_interface"], bool(addresses["eth0"]), bool(one["limits"])) == ("eth0", True, True)
    assert [one for one in found["findings"] if one["check"] in ("report", "clock", "MTU")] == []
    (desk.path / "all.json").write_text(done.stdout)
    assert desk.hpcrun("doctor", "compare", "all.json", code=None).exit_code == done.exit_code


def test_a_node_that_others_do_not_reach_is_named(desk: Desk) -> None:
    desk.profile("network: {interface: eth0}\n")
    before = ("salloc", "-N4", "--mem=1G")
    calm = json.loads(desk.hpcrun("doctor", "--all", "--connect", "--json", before=before, code=None).stdout)
    assert [one for one in calm["findings"] if one["check"] == "connection"] == []
    places = {
        one["node"]: face["networks"][0].partition("/")[0]
        for one in calm["nodes"]
        for face in one["interfaces"]
        if face["name"] == "eth0"
    }
    node = desk.lab.node("n03")
    routes = [["ip", "route", "add", "blackhole", f"{places[other]}/32"] for other in ("n01", "n02", "n04")]
    for route in routes:
        node.run(route).require_success()
    try:
        done = desk.hpcrun("doctor", "--all", "--connect", before=before, code=1)
    finally:
        for route in routes:
            node.run([*route[:2], "del", *route[3:]]).require_success()
    assert "error    connection  n03: 6 of its 6 connections over eth0 fail: " in done.stdout
