"""What fails together, level by level, as far as it is known."""

from __future__ import annotations

from hpcrun.fabric.domains import failure_domains
from hpcrun.fabric.graph import flat_fabric
from tests.fabric.test_graph import TWO_RACKS


def test_every_level_has_the_unit_of_every_node_innermost_first() -> None:
    found = failure_domains(TWO_RACKS, ["b1", "a1", "fat", "elsewhere", "b1"])
    assert list(found) == ["leaf", "spine", "core"]
    assert found["leaf"] == {"b1": "b", "a1": "a", "fat": "x", "elsewhere": None}
    assert found["spine"] == {"b1": "s1", "a1": "s1", "fat": None, "elsewhere": None}


def test_a_fabric_of_which_nothing_is_known_has_no_levels() -> None:
    assert failure_domains(flat_fabric(["n1", "n2"], "unknown"), ["n1", "n2"]) == {}
