"""Files that settings name: those that are missing, and those of another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.specs.cluster import NetworkSpec
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.checks import check_host
from hpcrun.tuning.host.doctor_report import examine_host
from hpcrun.tuning.host.fleet import compare_nodes
from hpcrun.tuning.host.node_report import read_host_report
from hpcrun.tuning.lint.named_files import find_named_files
from tests.tuning.trees import lay_out

TOPOLOGY = """<system version="1"><cpu numaid="0"><pci busid="{gpu}" class="0x030200"/>
<pci busid="0000:18:00.0" class="0x020700"><nic><net name="{nic}" dev="0" speed="400000"/></nic></pci></cpu>
<cpu numaid="1"><pci busid="0000:99:00.0" class="0x030200"/></cpu></system>"""


def node(root: Path, conf: str, **files: str) -> Path:
    """A healthy node with an nccl.conf and files of the root's folder `x`."""
    lay_out("roce-healthy", root)
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/nccl.conf").write_text(conf)
    (root / "x").mkdir()
    for name, text in files.items():
        (root / "x" / name).write_text(text)
    return root


def told(root: Path) -> list[str]:
    found = check_host(HostCheckInput(read_host_report(root), NetworkSpec()))
    return [f"{one.severity} {one.subject}: {one.text}" for one in found if one.check == "file"]


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("NCCL_TOPO_FILE=/x/none.xml", "warning NCCL_TOPO_FILE: '/x/none.xml' is not a file here, and"),
        ("NCCL_TOPO_FILE=/x/empty", "warning NCCL_TOPO_FILE: '/x/empty' is empty, and NCCL passes over that"),
        ("NCCL_TOPO_FILE=/x/text", "warning NCCL_TOPO_FILE: '/x/text' holds no <system>, and"),
        ("NCCL_TOPO_FILE=/x", "warning NCCL_TOPO_FILE: '/x' is not a file here, and"),
        ("NCCL_GRAPH_FILE=/x/none.xml", "error NCCL_GRAPH_FILE: '/x/none.xml' is not a file here, and"),
        ("NCCL_GRAPH_FILE=/x/graphs", "warning NCCL_GRAPH_FILE: /x/graphs ({conf}:1) names GPU 7, and"),
        ("NCCL_TUNER_CONFIG_FILE=/x/no.csv", "warning NCCL_TUNER_CONFIG_FILE: '/x/no.csv' is not a file"),
        ("NCCL_NET_PLUGIN=/x/libnccl-net.so", "warning NCCL_NET_PLUGIN: '/x/libnccl-net.so' is no"),
        ("NCCL_NET_PLUGIN=aws-ofi", "warning NCCL_NET_PLUGIN: 'aws-ofi' is in no folder of LD_LIBRARY_PATH"),
        ("NCCL_TUNER_PLUGIN=libnccl-tuner-x.so", "warning NCCL_TUNER_PLUGIN: 'libnccl-tuner-x.so' is"),
        ("NCCL_DEBUG_FILE=/logs/n.%h.%p", "warning NCCL_DEBUG_FILE: '/logs/n.%h.%p' is in a folder"),
        ("NCCL_TOPO_DUMP_FILE=/x/text/a.xml", "warning NCCL_TOPO_DUMP_FILE: '/x/text/a.xml' is in what"),
        ("NCCL_TOPO_FILE=/x/other.xml", "warning NCCL_TOPO_FILE: /x/other.xml ({conf}:1) describes GPUs at"
                                        " 0000:07:00.0, and this node's are at 0000:17:00.0, "),
        ("NCCL_TOPO_FILE=/x/nics.xml", "warning NCCL_TOPO_FILE: /x/nics.xml ({conf}:1) describes the"),
        ("NCCL_TOPO_FILE=/x/half.xml", "warning NCCL_TOPO_FILE: /x/half.xml ({conf}:1) does not"
                                       " describe this node's GPUs at 0000:99:00.0"),
    ],
)  # fmt: skip
def test_files_that_nccl_conf_names(conf: str, said: str, tmp_path: Path) -> None:
    right = TOPOLOGY.format(gpu="0000:17:00.0", nic="mlx5_0")
    root = node(
        tmp_path / "n1",
        f"{conf}\n",
        empty="",
        text="nothing",
        graphs='<graphs version="1"><graph id="0"><channel><gpu dev="7"/></channel></graph></graphs>',
        **{
            "other.xml": TOPOLOGY.format(gpu="0000:07:00.0", nic="mlx5_0"),
            "nics.xml": TOPOLOGY.format(gpu="0000:17:00.0", nic="mlx5_7"),
            "half.xml": right.replace('<pci busid="0000:99:00.0" class="0x030200"/>', ""),
        },
    )
    (line,) = told(root)
    assert line.startswith(said.replace("{conf}", str(root / "etc/nccl.conf")))


@pytest.mark.parametrize(
    "conf",
    [
        "NCCL_TOPO_FILE=/x/right.xml",
        "NCCL_NET_PLUGIN=none",
        "NCCL_NET_PLUGIN=right",
        "NCCL_NET_PLUGIN=/x/libnccl-net-right.so,none",
        "NCCL_DEBUG_FILE=/x/n.%h.%p",
        "NCCL_DEBUG_FILE=/dev/stderr",
        "NCCL_DEBUG=INFO",
        "NCCL_TUNER_PLUGIN=libnccl-tuner-ofi.so",
        "NCCL_IBVERBS_LIB=libibverbs.so.1",
        "NCCL_TOPO_FILE=",
    ],
)
def test_files_that_are_right_are_no_matter(conf: str, tmp_path: Path) -> None:
    right = TOPOLOGY.format(gpu="17:00.0", nic="mlx5_0").replace("0000:99", "99")
    right = right.replace("17:00.0", "0000:17:00.0").replace('"99:', '"0000:99:')
    root = node(tmp_path / "n1", f"{conf}\n", **{"right.xml": right, "libnccl-net-right.so": "x"})
    (root / "proc/self/environ").write_text("LD_LIBRARY_PATH=/none:/x\0")
    (root / "etc/ld.so.conf.d").mkdir()
    (root / "etc/ld.so.conf.d/ofi.conf").write_text("# the vendor's\n/opt/ofi/lib\n")
    (root / "opt/ofi/lib").mkdir(parents=True)
    (root / "opt/ofi/lib/libnccl-tuner-ofi.so").write_text("x")
    assert told(root) == []


def test_the_environment_and_what_jobs_are_advised_name_files_too(tmp_path: Path) -> None:
    root = node(tmp_path / "n1", "")
    (root / "proc/self/environ").write_text("NCCL_CONF_FILE=/x/mine\0NCCL_DEBUG=INFO\0")
    (root / "x/mine").write_text("NCCL_TUNER_CONFIG_FILE=/x/tuner.csv\n")
    host = read_host_report(root, advised={"NCCL_TOPO_FILE": "/x/topo.xml"})
    lacking = {one.variable: one.where for one in host.files if one.lacks}
    assert lacking == {"NCCL_TOPO_FILE": "", "NCCL_TUNER_CONFIG_FILE": f"{root}/x/mine:1"}


def test_a_file_that_differs_between_nodes_is_named(tmp_path: Path) -> None:
    reports = {}
    for name, nic in (("n1", "mlx5_0"), ("n2", "mlx5_0"), ("n3", "mlx5_1")):
        text = TOPOLOGY.format(gpu="0000:17:00.0", nic=nic)
        root = node(tmp_path / name, "NCCL_TOPO_FILE=/x/topo.xml\n", **{"topo.xml": text})
        reports[name] = examine_host(HostCheckInput(read_host_report(root), NetworkSpec())).as_json()
    lines = [str(one) for one in compare_nodes(reports) if one.check == "content"]
    assert len(lines) == 1
    assert lines[0].startswith("n3: NCCL_TOPO_FILE /x/topo.xml: content is ")


def test_odd_values_are_no_error(tmp_path: Path) -> None:
    values = {
        "NCCL_TOPO_FILE": "a\0b",
        "NCCL_NET_PLUGIN": ",,",
        "NCCL_GRAPH_FILE": "~/x",
        "NCCL_DEBUG_FILE": "x",
    }
    assert [one.state for one in find_named_files(values, tmp_path)] in (["relative"], ["unreadable"], [])
