"""Lists of interfaces and devices as NCCL reads them."""

from __future__ import annotations

import pytest

from hpcrun.fabric.ports import NetworkInterface
from hpcrun.tuning.registry.device_names import choose_socket_interface, parse_device_list, render_exact_names


@pytest.mark.parametrize(
    ("text", "taken", "left"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10"], ["mlx5_2"]),
        ("=mlx5_1", ["mlx5_1"], ["mlx5_10", "mlx5_2"]),
        ("^mlx5_1", ["mlx5_2"], ["mlx5_1", "mlx5_10"]),
        ("^=mlx5_1,mlx5_2", ["mlx5_10"], ["mlx5_1", "mlx5_2"]),
        ("ib", ["ib0", "ibs1"], ["eth0"]),
        ("=mlx5_0:1:rail0", ["mlx5_0"], ["mlx5_1"]),
    ],
)
def test_lists(text: str, taken: list[str], left: list[str]) -> None:
    names = parse_device_list(text)
    assert [name for name in (*taken, *left) if names.takes(name, 1)] == taken
    assert parse_device_list("").takes("eth0")
    assert not parse_device_list("^").entries


def test_a_port_s_number_counts() -> None:
    names = parse_device_list("=mlx5_0:2,mlx5_1")
    assert names.takes("mlx5_1", 2)
    assert [names.takes("mlx5_0", port) for port in (1, 2)] == [False, True]


def test_what_is_rendered_takes_just_these() -> None:
    assert render_exact_names(["mlx5_0", "mlx5_1"]) == "=mlx5_0,mlx5_1"


def faces(*names: str) -> list[NetworkInterface]:
    return [NetworkInterface(name, networks=("10.0.0.1/24",)) for name in names]


@pytest.mark.parametrize(
    ("there", "text", "version", "chosen"),
    [
        (["docker0", "eth0", "ib0", "lo"], "", None, "ib0"),
        (["docker0", "eth0", "lo"], "", None, "eth0"),
        (["virbr0", "docker0", "lo"], "", None, "docker0"),
        (["docker0", "virbr0", "lo"], "", (2, 27, 7), "virbr0"),
        (["docker0", "eth0"], "bond0", None, None),
        (["bond0.2093", "bond0"], "bond0", None, "bond0.2093"),
        (["bond0.2093", "bond0"], "=bond0", None, "bond0"),
        (["docker0", "eth0"], "^docker,lo", None, "eth0"),
    ],
)
def test_sockets(there: list[str], text: str, version: tuple[int, ...] | None, chosen: str | None) -> None:
    found = choose_socket_interface(faces(*there), text, version)
    assert (found.name if found else None) == chosen


def test_an_interface_without_an_address_is_no_choice() -> None:
    assert choose_socket_interface([NetworkInterface("ib0"), *faces("eth0")]) == faces("eth0")[0]
