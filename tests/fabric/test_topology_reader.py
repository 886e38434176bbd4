"""Every form of topology text: what comes out, that it survives being written and read, and odd ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.fabric.graph import Fabric, FabricLevel, Grid
from hpcrun.fabric.topology_reader import (
    fabric_from_addresses,
    fabric_from_names,
    fabric_from_table,
    find_fabric,
    parse_fabric,
)
from hpcrun.slurm.cluster_state import LiveCluster, parse_cluster_answers
from hpcrun.specs.cluster import ClusterSpec, parse_cluster
from tests.fabric.rendered_topology import render_topology

DATA = Path(__file__).parents[1] / "data"
OURS = sorted(path for path in (DATA / "topology").iterdir() if path.is_file())
SLURM = sorted((DATA / "slurm").glob("*/show-topo*.txt"))
ODD = DATA / "topology" / "odd"


def content(path: Path) -> str:
    """The text of a file; what Slurm printed stands between the command and its exit code."""
    text = path.read_text(encoding="utf-8")
    if "slurm" not in path.parts:
        return text
    text = text.partition("\n")[2]
    return text.rpartition("[exit ")[0] or text


def read(name: str) -> Fabric:
    return parse_fabric(content(DATA / "topology" / name), name=name)


def shape(fabric: Fabric) -> dict[str, tuple[str | None, ...]]:
    return dict(zip(fabric.nodes, fabric.units, strict=True))


def graph(fabric: Fabric) -> tuple[object, ...]:
    return fabric.nodes, fabric.levels, fabric.units, dict(fabric.rails), fabric.grids


def test_a_tree() -> None:
    fabric = read("tree-22.05.txt")
    assert [level.name for level in fabric.levels] == ["leaf", "spine"]
    assert fabric.members(0) == {
        "leaf1": ("login-a", "rack1-n01", "rack1-n02", "rack1-n03", "rack1-n04"),
        "leaf2": ("rack2-n01", "rack2-n02", "rack2-n03", "rack2-n04"),
    }
    assert list(fabric.members(1)) == ["spine"]
    assert fabric.notes == ()


def test_leaves_at_several_depths() -> None:
    fabric = read("tree-mixed-depths.txt")
    assert [level.name for level in fabric.levels] == ["leaf", "spine", "core"]
    assert shape(fabric)["n05"] == ("leaf3", "spine2", "core")
    assert shape(fabric)["fat1"] == ("leaf5", None, "core")
    assert shape(fabric)["nfs1"] == (None, "spine1", "core")


def test_several_rails() -> None:
    fabric = read("tree-rails.txt")
    assert fabric.rails["gpu001"] == ("su1-rail1", "su1-rail2")
    assert "gpu008" not in fabric.rails
    assert {units for node, units in shape(fabric).items() if node > "gpu004"} == {("su2-rail1", "plane1")}


def test_below_several_switches_the_one_with_most_below_it_counts() -> None:
    lines = "".join(f"SwitchName=leaf{number} Nodes=n{number}\n" for number in (1, 2, 3))
    lines += "SwitchName=small Switches=leaf1\nSwitchName=large Switches=leaf[1-3]\n"
    fabric = parse_fabric(lines, name="t")
    assert {units[1] for units in fabric.units} == {"large"}
    assert "1 switch below more than one other; one counts" in fabric.notes


def test_several_roots() -> None:
    fabric = read("tree-roots.txt")
    assert fabric.common_level("n1", "n8") == 2
    assert fabric.common_level("n1", "c1") == 3
    assert any("2 switches have none above them" in note for note in fabric.notes)
    assert "eth2" not in fabric.members(0)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("blocks-24.05.txt", ["nvl1", "nvl2"]),
        ("blocks-24.11.txt", ["nvl1", "nvl2"]),
        ("blocks.conf", ["b1", "b2"]),
    ],
)
def test_blocks_are_as_large_as_their_nodes_are_many(name: str, blocks: list[str]) -> None:
    fabric = read(name)
    assert fabric.levels == (FabricLevel("block"),)
    assert [(block, len(nodes)) for block, nodes in fabric.members(0).items()] == [
        (one, 18) for one in blocks
    ]


def test_rings_and_tori_keep_the_order_of_their_places() -> None:
    assert read("ring-26.05.txt").grids[1] == Grid("r1", (4,), ("n11", "n13", "n12", "n14"))
    assert read("ring.conf").hops("n07", "n05") == 1
    torus = read("torus-26.05.txt")
    assert (torus.levels, torus.hops("n01", "n17"), torus.hops("n01", "n04")) == ((), 1, 1)
    assert read("torus.yaml").grids == (Grid("pod1", (2, 3, 1), ("n1", "n2", "n3", "n4", "n5", "n6")),)


def test_a_torus_whose_nodes_do_not_fill_it_gives_no_distances() -> None:
    fabric = parse_fabric("TorusName=t Dims=2x2x2 Nodes=n[1-7]\n", name="t")
    assert (fabric.nodes[-1], fabric.grids, fabric.hops("n1", "n2")) == ("n7", (), None)
    assert "7 nodes do not fill its places (2x2x2)" in fabric.notes[0]


def test_topology_conf_has_comments_any_case_and_continued_lines() -> None:
    fabric = read("tree.conf")
    assert fabric.members(0)["leaf3"] == ("n09", "n10", "n11")
    assert list(fabric.members(1)) == ["spine1"]
    assert len(fabric.nodes) == 11


def test_blocks_of_another_topology_are_a_level_below_the_leaves() -> None:
    fabric = read("topology.yaml")
    assert [level.name for level in fabric.levels] == ["block", "leaf", "spine"]
    assert shape(fabric)["rack1-n03"] == ("nvl2", "leaf1", "spine")
    assert "of several topologies fabric is taken" in fabric.notes[0]


def test_blocks_across_leaves_are_left_out_and_said() -> None:
    fabric = parse_fabric(
        "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\nBlockName=b Nodes=n[2-3]\n", name="t"
    )
    assert [level.name for level in fabric.levels] == ["leaf"]
    assert "the blocks are left out: b lies below more than one leaf" in fabric.notes


def test_a_table() -> None:
    fabric = read("table.yaml")
    assert shape(fabric)["n05"] == ("leaf2", "spine1")
    assert fabric_from_table({"leaf1": "n[1-2]", "leaf2": None}, "topology.table").members(0) == {
        "leaf1": ("n1", "n2")
    }
    mixed = fabric_from_table({"core": {"spine": {"leaf1": "n1"}, "leaf2": "n2"}}, "topology.table")
    assert shape(mixed) == {"n1": ("leaf1", "spine", "core"), "n2": ("leaf2", None, "core")}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"leaf1": 3}, "topology.table leaf1: must be a list of nodes"),
        ({"leaf 1": "n1"}, "topology.table: 'leaf 1' is not a name of a switch"),
        ({"leaf1": "n[1"}, r"topology.table SwitchName=leaf1 Nodes: 'n\[1' is not a host list"),
        ({"a": {"l": "n1"}, "b": {"l": "n2"}}, "topology.table SwitchName=l: stands twice"),
        ({"a": {"a": "n1"}}, "topology.table SwitchName=a: stands twice"),
    ],
)
def test_mistakes_in_a_table(table: Mapping[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fabric_from_table(table, "topology.table")


def test_ibnetdiscover() -> None:
    fabric = read("ibnetdiscover.txt")
    assert fabric.nodes == (*(f"n{number:02}" for number in range(1, 9)), "n10", "ufm1")
    assert shape(fabric)["n08"] == ("leaf02", "spine01")
    assert shape(fabric)["ufm1"] == (None, "spine01")
    assert fabric.rails == {"n01": ("leaf01", "leaf02"), "n02": ("leaf01", "leaf02")}
    assert fabric.common_level("n01", "n04") == 2
    assert any("'MT4123 ConnectX6" in note for note in fabric.notes)


def ib(switches: Mapping[str, Mapping[int, str]], names: Mapping[str, str] = {}) -> str:
    """What ibnetdiscover prints of these switches and what hangs on their ports, hosts in lower case."""
    guids = {name: f"S-{number:016x}" for number, name in enumerate(switches, 1)}
    lines = []
    for name, ports in switches.items():
        lines += [
            "",
            f'Switch\t40 "{guids[name]}"\t\t# "{names.get(name, f"MF0;{name}:MQM/U1")}" base port 0 lid 1',
        ]
        for port, peer in ports.items():
            guid = guids.get(peer) or f"H-{sum(map(ord, peer)):08x}{port:08x}"
            lines.append(f'[{port}]\t"{guid}"[1]\t\t# "{peer}" lid 9 4xHDR')
    for name, ports in switches.items():
        for port, peer in ports.items():
            if peer not in guids:
                guid = f"H-{sum(map(ord, peer)):08x}{port:08x}"
                lines += [
                    "",
                    f'Ca\t1 "{guid}"\t\t# "{peer} mlx5_0"',
                    f'[1](ab)\t"{guids[name]}"[{port}]\t# lid 2',
                ]
    return "\n".join(lines)


def test_ibnetdiscover_of_three_levels() -> None:
    tree = {
        "CORE": {1: "POD1", 2: "POD2"},
        "POD1": {1: "L1", 2: "L2", 3: "CORE"},
        "POD2": {1: "L3", 3: "CORE"},
        "L1": {1: "n1", 2: "n2"},
        "L2": {3: "n3"},
        "L3": {4: "n4"},
    }
    fabric = parse_fabric(ib(tree), name="t")
    assert [level.name for level in fabric.levels] == ["leaf", "spine", "core"]
    assert shape(fabric) == {
        "n1": ("L1", "POD1", "CORE"),
        "n2": ("L1", "POD1", "CORE"),
        "n3": ("L2", "POD1", "CORE"),
        "n4": ("L3", "POD2", "CORE"),
    }


def test_ibnetdiscover_of_leaves_that_are_cabled_to_each_other() -> None:
    fabric = parse_fabric(ib({"L1": {1: "n1", 2: "L2"}, "L2": {3: "n2"}, "L3": {4: "n3"}}), name="t")
    assert (fabric.common_level("n1", "n2"), fabric.common_level("n1", "n3")) == (2, 3)
    assert shape(fabric)["n2"] == ("L2", "L1-spine")


def test_switches_that_nobody_named_go_by_their_guid() -> None:
    names = {"L1": "Quantum Mellanox Technologies", "L2": "Quantum Mellanox Technologies"}
    fabric = parse_fabric(ib({"L1": {1: "n1"}, "L2": {2: "n2"}}, names), name="t")
    assert set(fabric.members(0)) == {"S-0000000000000001", "S-0000000000000002"}


def test_the_chips_of_one_large_switch_are_told_apart() -> None:
    names = {"L1": "MF0;director:CS7520/L12/U1", "L2": "MF0;director:CS7520/L13/U1"}
    fabric = parse_fabric(ib({"L1": {1: "n1"}, "L2": {2: "n2"}}, names), name="t")
    assert set(fabric.members(0)) == {"director-CS7520-L12-U1", "director-CS7520-L13-U1"}


@pytest.mark.parametrize("path", [*OURS, *SLURM], ids=lambda path: "-".join(path.parts[-2:]))
def test_every_text_survives_being_written_and_read(path: Path) -> None:
    fabric = parse_fabric(content(path), name=path.name)
    assert graph(parse_fabric(render_topology(fabric), name="again")) == graph(fabric)
    assert fabric.levels or fabric.grids or "error" in content(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty.txt", "nothing"),
        ("none.txt", "No topology information available"),
        ("unavailable.txt", "slurm_load_topo error: Requested topology configuration is not available"),
        ("down.txt", "slurm_load_topo error: Unable to contact slurm controller"),
        ("flat.yaml", "the topology plain is flat"),
    ],
)
def test_where_no_topology_is_known_it_says_why(name: str, said: str) -> None:
    fabric = parse_fabric(content(ODD / name), name=name)
    assert (fabric.levels, fabric.nodes) == ((), ())
    assert said in fabric.notes[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated.txt", "truncated.txt:2 SwitchName=leaf2 Nodes: 'n[05-' is not a host list"),
        ("downwards.txt", "downwards.txt:1 SwitchName=leaf1 Nodes: 'n[04-01]' counts down from 04 to 01"),
        ("circle.conf", "circle.conf:4 SwitchName=c: the switches go round in a circle, a > b > c > a"),
        ("itself.conf", "itself.conf:2 SwitchName=spine: is listed below itself"),
        ("undefined.conf", "undefined.conf:2 SwitchName=spine: leaf2, leaf3 below it are nowhere described"),
        ("twice.conf", "twice.conf:3 SwitchName=leaf1: stands twice, first on line 1"),
        ("broken.yaml", "broken.yaml:4: is not valid YAML"),
    ],
)
def test_a_text_that_contradicts_itself_is_refused_with_its_line(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fabric(content(ODD / name), name=name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def mutations(text: str, chance: random.Random) -> str:
    """The text with a few accidents: cut, doubled or swapped lines, lost or strange characters."""
    for _ in range(chance.randint(1, 4)):
        lines = text.splitlines(keepends=True) or [""]
        at, place = chance.randrange(len(lines)), chance.randrange(len(text) + 1)
        match chance.randrange(6):
            case 0:
                text = text[:place]
            case 1:
                text = text[:place] + text[place + chance.randint(1, 9) :]
            case 2:
                text = (
                    text[:place]
                    + chance.choice(["[", "]", ",", "=", "\0", "é", " ", "\n", "{", ": "])
                    + text[place:]
                )
            case 3:
                text = "".join([*lines, lines[at]])
            case 4:
                text = "".join(lines[:at] + lines[at + 1 :])
            case _:
                word = chance.choice(text.split() or ["x"])
                text = text[:place] + word + text[place:]
    return text


def test_the_first_rail_stays_the_first_when_written() -> None:
    units = (("l2",), ("l1",), ("l1",))
    rails = {"n2": ("l1", "l2"), "n3": ("l1", "l2", "l3")}
    fabric = Fabric(("n1", "n2", "n3"), (FabricLevel("leaf"),), units, rails)
    assert graph(parse_fabric(render_topology(fabric), name="again")) == graph(fabric)
    crossed = Fabric(
        ("n1", "n2"), (FabricLevel("leaf"),), units[:2], {"n1": ("l2", "l1"), "n2": ("l1", "l2")}
    )
    assert set(parse_fabric(render_topology(crossed), name="again").rails) == {"n1", "n2"}


def test_units_of_one_name_at_two_levels_are_told_apart_when_written() -> None:
    fabric = fabric_from_names(["a1-b1-n", "a1-b2-n"], r"a(?P<spine>\d)-b(?P<leaf>\d)")
    again = parse_fabric(render_topology(fabric), name="again")
    assert again.units == (("1", "1-spine"), ("2", "1-spine"))


def attempt(text: str) -> Fabric | str:
    """The fabric, or the message in its place."""
    try:
        return parse_fabric(text, name="mutated")
    except UsageError as error:
        return str(error)


def test_a_yaml_file_with_a_mistake_is_not_taken_for_a_text_that_says_nothing() -> None:
    with pytest.raises(UsageError, match=r"table\.yaml:2 leaf1: stands twice, first on line 1"):
        parse_fabric("leaf1: n[1-2]\nleaf1: n[3-4]\n", name="table.yaml")
    assert parse_fabric("leaf1: n[1-2]\nleaf2: n[3-4]\n", name="-").members(0)["leaf2"] == ("n3", "n4")


def test_no_accident_makes_it_crash() -> None:
    chance = random.Random(20)
    texts = [content(path) for path in (*OURS, *SLURM, *sorted(ODD.iterdir()))]
    read_well = 0
    for number in range(600):
        text = mutations(texts[number % len(texts)], chance)
        fabric = attempt(text)
        if isinstance(fabric, str):
            assert fabric.startswith("mutated"), text
            continue
        assert len(fabric.units) == len(fabric.nodes)
        assert {len(units) for units in fabric.units} <= {len(fabric.levels)}
        somewhere = {node for grid in fabric.grids for node in grid.nodes}
        somewhere |= {node for node, units in shape(fabric).items() if any(units)}
        placed = fabric.restricted(node for node in fabric.nodes if node in somewhere)
        assert graph(parse_fabric(render_topology(fabric), name="again")) == graph(placed), text
        read_well += 1
    assert 200 < read_well < 600


def test_names_and_features() -> None:
    fabric = fabric_from_names(["r1-n2", "r1-n1", "r2-n1", "login"], r"^(?P<spine>r)(?P<leaf>\d+)-")
    assert [level.name for level in fabric.levels] == ["leaf", "spine"]
    assert shape(fabric) == {
        "r1-n2": ("1", "r"),
        "r1-n1": ("1", "r"),
        "r2-n1": ("2", "r"),
        "login": (None, None),
    }
    assert fabric.notes == ("topology.pattern finds no leaf for 1 node, login",)
    by_feature = fabric_from_names(
        ["a", "b"], r"^(?P<leaf>rack\d+)$", {"a": ["gpu", "rack7"], "b": ["rack8"]}
    )
    assert (shape(by_feature), by_feature.source) == (
        {"a": ("rack7",), "b": ("rack8",)},
        "node features (topology.pattern)",
    )
    assert fabric_from_names(["a", "b"], r"(?P<leaf>rack\d+)").levels == ()


@pytest.mark.parametrize(
    ("pattern", "message"), [("(", "is not a regular expression"), (r"rack\d+", "has no group `leaf`")]
)
def test_mistakes_in_the_pattern(pattern: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fabric_from_names(["n1"], pattern)


def test_addresses_inside_the_allocation() -> None:
    tree = fabric_from_addresses(
        {
            "n05": ("spine.leaf2.n05", "switch.switch.node"),
            "n01": ("spine.leaf[1-2].n01", "switch.switch.node"),
            "n09": ("spine..n09", "switch.switch.node"),
        }
    )
    assert [level.name for level in tree.levels] == ["leaf", "spine"]
    assert shape(tree) == {"n05": ("leaf2", "spine"), "n01": ("leaf1", "spine"), "n09": (None, "spine")}
    assert tree.rails == {"n01": ("leaf1", "leaf2")}
    blocks = fabric_from_addresses({"n05": ("b3.n05", "block.node"), "n06": ("b3.n06", "block.node")})
    assert (blocks.levels, blocks.members(0)) == ((FabricLevel("block"),), {"b3": ("n05", "n06")})
    plain = fabric_from_addresses({"n1.site.org": ("n1.site.org", "node")})
    assert (plain.levels, plain.notes) == ((), ("Slurm gives the nodes no place in a topology",))
    odd = fabric_from_addresses({"n1": ("", ""), "n2": ("n2", "switch.node")})
    assert (odd.levels, len(odd.notes)) == ((), 3)


def live(version: str, **answers: str) -> LiveCluster:
    names = {"topology": "show-topology", "nodes": "show-nodes-oneline"}
    found = {key: content(DATA / "slurm" / version / f"{name}.txt") for key, name in names.items()}
    return parse_cluster_answers({**found, **answers})


def profile(text: str) -> ClusterSpec:
    return parse_cluster(f"name: here\n{text}", "here.yaml")


LEVELS = """
  levels:
    - {name: leaf, bandwidth_GBps: 50}
    - {name: spine, bandwidth_GBps: 25, oversubscription: 2, latency_us: 1.5}
"""


def test_slurm_s_answer_with_what_the_profile_says_of_the_levels() -> None:
    fabric = find_fabric(profile(f"topology:{LEVELS}"), live("25.11.7"), None)
    assert fabric.levels == (FabricLevel("leaf", 50e9, 1.0), FabricLevel("spine", 25e9, 2.0, 1.5e-6))
    assert fabric.source == "Slurm (tree)"
    assert fabric.nodes == tuple(f"n{number:02}" for number in range(1, 9))


def test_unknown_bandwidths_stay_unknown_and_are_said() -> None:
    fabric = find_fabric(None, live("22.05.8"), None)
    assert [level.bandwidth_Bps for level in fabric.levels] == [None, None]
    assert [note for note in fabric.notes if "bandwidth unknown" in note] == [
        f"{name}: bandwidth unknown; name it in topology.levels of the cluster's profile"
        for name in ("leaf", "spine")
    ]


def test_levels_by_position_where_the_names_differ_and_a_block_that_is_none_of_them() -> None:
    names = "topology:\n  levels: [{name: tor, bandwidth_GBps: 5}, {name: agg, bandwidth_GBps: 4}]\n"
    file = DATA / "topology" / "topology.yaml"
    fabric = find_fabric(profile(names), None, file)
    assert fabric.levels == (FabricLevel("block"), FabricLevel("tor", 5e9, 1.0), FabricLevel("agg", 4e9, 1.0))
    deep = find_fabric(profile(f"topology:{LEVELS}    - {{name: core, bandwidth_GBps: 1}}\n"), None, file)
    assert "the profile's levels core are not in the topology" in deep.notes


def test_a_file_wins_and_the_order_of_the_nodes_is_kept() -> None:
    file = DATA / "topology" / "tree.conf"
    fabric = find_fabric(profile("topology: {source: none}"), live("22.05.8"), file)
    assert len(fabric.nodes) == 11
    fabric = find_fabric(None, None, file, ["n06", "n01", "other"])
    assert shape(fabric) == {"n06": ("leaf2", "spine1"), "n01": ("leaf1", "spine1"), "other": (None, None)}
    assert "in no unit of the topology: 1 node, other" in fabric.notes
    with pytest.raises(UsageError, match="nowhere: cannot be read: No such file"):
        find_fabric(None, None, Path("nowhere"))


def test_the_sources_of_the_profile(tmp_path: Path) -> None:
    nodes = ["r1-n1", "r1-n2", "r2-n1"]
    by_name = profile(r"topology: {source: names, pattern: '^(?P<leaf>r\d+)'}")
    assert list(find_fabric(by_name, None, None, nodes).members(0)) == ["r1", "r2"]
    (tmp_path / "topology.conf").write_text("SwitchName=x Nodes=r1-n[1-2]\n", encoding="utf-8")
    by_file = profile(f"topology: {{source: file, file: {tmp_path}/topology.conf}}")
    assert shape(find_fabric(by_file, None, None, nodes))["r2-n1"] == (None,)
    one = profile("topology: {source: none, levels: [{name: leaf, bandwidth_GBps: 12}]}")
    assert find_fabric(one, None, None, nodes).levels == (FabricLevel("leaf", 12e9, 1.0),)
    assert find_fabric(profile("topology: {source: none}"), None, None, nodes).levels == ()


def test_where_slurm_knows_nothing_the_order_is_plain_and_the_reason_is_given() -> None:
    nodes = tuple(f"n{number:02}" for number in range(1, 9))
    flat = live(
        "22.05.8", topology="No topology information available", config="TopologyPlugin = topology/none"
    )
    cases = [
        (find_fabric(None, None, None, nodes), "Slurm was not asked"),
        (find_fabric(None, flat, None), "TopologyPlugin=none knows no switches"),
        (find_fabric(None, live("22.05.8", topology=""), None), "`scontrol show topology` said: nothing"),
        (
            find_fabric(None, live("22.05.8", topology=content(ODD / "truncated.txt")), None),
            "is not a host list",
        ),
    ]
    for fabric, reason in cases:
        assert (fabric.levels, fabric.nodes) == ((), nodes)
        assert reason in fabric.notes[0]


def test_a_flat_slurm_falls_back_on_names_and_then_on_features() -> None:
    flat = live("25.11.7", topology="No topology information available")
    by_name = find_fabric(profile("topology: {pattern: '(?P<leaf>0[1-4]|0[5-8])'}"), flat, None)
    assert (len(by_name.members(0)), by_name.source) == (8, "node names (topology.pattern)")
    by_feature = find_fabric(profile("topology: {pattern: '^(?P<leaf>rack.+)$'}"), flat, None)
    assert (list(by_feature.members(0)), by_feature.source) == (["rack1"], "node features (topology.pattern)")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('  tree:\n    switches: "s1=n[1-8],s2=n[9-16]"\n', "t:4 tree.switches: must be a list of switches"),
        ("  tree:\n    switches: {s1: n1}\n", "t:4 tree.switches: must be a list of switches"),
        ("  tree:\n    switches: []\n", "t:4 tree.switches: must be a list of switches, .* and is nothing"),
        ("  tree: [s1, s2]\n", "t:3 tree: must hold switches"),
        ("  tree: s1\n", "t:3 tree: must hold switches"),
        ("  tree:\n    switch:\n    - switch: a\n      nodes: n1\n", "t:3 tree: must hold .*; found: switch"),
        ("  tree:\n    switches:\n    - n[1-8]\n", r"t:5 tree.switches.0: must be `switch: NAME`"),
        (
            "  tree:\n    switches:\n    - nodes: n1\n",
            "t:5 tree.switches.0: has no name; write `switch: NAME`",
        ),
        (
            "  tree:\n    switches:\n    - switch: a\n      node: n1\n",
            "t:5 tree.switches.0: holds nothing; write nodes or children; found: node",
        ),
        (
            "  tree:\n    switches:\n    - switch: a\n      nodes: [n1, n2]\n",
            "t:6 tree.switches.0.nodes: must be one text",
        ),
        ("  block:\n    blocks: b[1-4]\n", "t:4 block.blocks: must be a list of blocks"),
        ("  block:\n    block_sizes: [2]\n", "t:3 block: must hold blocks"),
        ("  block:\n    blocks:\n    - name: b1\n      nodes: n1\n", "t:5 block.blocks.0: has no name"),
        ("  ring:\n    rings: 3\n", "t:4 ring.rings: must be a list of rings"),
        ("  torus3d:\n    toruses: x\n", "t:4 torus3d.toruses: must be a list of toruses"),
        ("  treee:\n    switches: []\n", "t:3 treee: is not known; did you mean tree?"),
        ("  tree: {}\n", "t:1: describes no topology; write one of flat: true, tree, .*; found: tree"),
        ("", "t:1: describes no topology; .*; found: nothing"),
        ("  flat: sure\n", "t:3 flat: must be true or false"),
        ("  flat: true\n- topology: hall\n  flat: true\n", "t:4 topology: 'hall' stands twice"),
        ("  flat: true\n- hall\n", "t:4: must be a mapping|t:4 items.1: must be a mapping"),
        ("  flat: true\n- tree: {}\n", "t:4 topology: must be the topology's name"),
    ],
)
def test_a_topology_yaml_with_a_mistake_is_refused_with_its_line(body: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_fabric(f"- topology: hall\n  cluster_default: true\n{body}", name="t")


def test_no_file_is_called_healthy_that_was_not_understood(tmp_path: Path) -> None:
    whole = content(DATA / "topology" / "ibnetdiscover.txt")
    lines = whole.splitlines(keepends=True)
    first_host = next(number for number, line in enumerate(lines) if line.startswith("Ca"))
    texts = {
        "cut before the hosts": "".join(lines[: first_host - 4]),
        "cut among the hosts": "".join(lines[: first_host + 1]),
        "cut in the first switch": "".join(lines[:13]),
        "cut before anything": "".join(lines[:8]),
        "cut in a word": whole[: len(whole) // 2],
        "of another tool": "CA 'mlx5_0'\n\tCA type: MT4129\n",
        "misspelt": "SwichName=s1 Nodes=n[1-8]\n",
        "misspelt key": "SwitchName=s1 Node=n[1-8]\n",
        "empty": "",
        "a list": "- name: hall\n  tree: {}\n",
    }
    for why, text in texts.items():
        path = tmp_path / "topology.txt"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError) as told:
            find_fabric(None, None, path)
        assert str(told.value).startswith(str(path)), why
        assert "\n" not in str(told.value), why
    path.write_text("No topology information available\n", encoding="utf-8")
    assert find_fabric(None, None, path).nodes == ()


def test_every_cut_of_ibnetdiscover_is_noticed() -> None:
    whole = content(DATA / "topology" / "ibnetdiscover.txt")
    nodes = parse_fabric(whole, name="t").nodes
    lines = whole.rstrip().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        fabric = attempt("".join(lines[:kept]))
        if isinstance(fabric, str):
            assert "cut short" in fabric or "no host below them" in fabric
        else:
            assert fabric.is_unread or fabric.notes or fabric.nodes == nodes, kept


def test_lines_that_were_passed_over_are_said() -> None:
    text = "SwitchName=s1 Nodes=n[1-4]\nSwichName=s2 Nodes=n[5-8]\n# a comment\n\nSwitchName=s3 Node=n9\n"
    notes = parse_fabric(text, name="t").notes
    assert any(
        note.startswith("t:2: 2 lines not understood and left out, such as 'SwichName=s2") for note in notes
    )
    assert not any("not understood" in note for note in read("tree.conf").notes)
    assert not any("not understood" in note for note in read("blocks.conf").notes)
    odd = content(DATA / "topology" / "ibnetdiscover.txt").replace('[1]\t"H-', '[1]\t"?-', 1)
    assert any(
        "1 line of ports not understood, the first is line 11" in note
        for note in parse_fabric(odd, name="t").notes
    )
