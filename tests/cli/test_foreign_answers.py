"""What is no answer, or a part of one: no reader takes it for a healthy one, or for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from hpcrun.checkpoint.lustre.lfs import (
    LfsError,
    parse_getstripe,
    parse_lfs_df,
    parse_lfs_project,
    parse_lfs_quota,
)
from hpcrun.cli.doctor import app as doctor
from hpcrun.cli.fabric import app as fabric
from hpcrun.cli.tune import app as tune
from hpcrun.errors import HpcrunError
from hpcrun.health.gpu_health import judge_gpus, parse_gpu_health

FOREIGN = {
    "empty": b"",
    "blanks": b" \n\n",
    "binary": b"\x7fELF\x02\x01\x00\x80\xff\x00\x01",
    "page": b"<html><body>502 Bad Gateway</body></html>\n",
    "another tool": b"Filesystem 1K-blocks Used\n/dev/sda1 100 50\n",
    "an error": b"slurm_load_topo: error: Unable to contact slurm controller (connect failure)\n",
    "cut short": b"# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor)\n#\n#       si",
}
READERS: dict[str, tuple[Typer, list[str]]] = {
    "fabric show": (fabric, ["show", "--topology", "FILE"]),
    "doctor compare": (doctor, ["compare", "FILE", "FILE"]),
    "doctor since": (doctor, ["--root", "FOLDER", "--since", "FILE"]),
    "doctor pairs": (doctor, ["pairs", "n[1-4]", "FILE"]),
    "tune predict": (tune, ["predict", "--log", "FILE"]),
    "tune policy show": (tune, ["policy", "show", "FILE"]),
    "tune policy add": (
        tune,
        ["policy", "add", "FOLDER/p.yaml", "--set", "NCCL_IB_TC=1", "--with", "FILE", "--without", "FILE"],
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_refuses_what_it_does_not_understand(reader: str, tmp_path: Path) -> None:
    app, words = READERS[reader]
    for name, content in FOREIGN.items():
        path = tmp_path / "said.txt"
        path.write_bytes(content)
        argv = [word.replace("FILE", str(path)).replace("FOLDER", str(tmp_path)) for word in words]
        result = CliRunner().invoke(app, argv)
        assert result.exit_code != 0, (name, result.output)
        told = f"{result.output} {result.exception}"
        assert isinstance(result.exception, HpcrunError | SystemExit), (name, result.exception)
        assert str(path) in told.replace("\n", ""), (name, told)


def test_a_log_that_is_none_is_not_called_quiet(tmp_path: Path) -> None:
    path = tmp_path / "said.txt"
    for name, content in FOREIGN.items():
        path.write_bytes(content)
        told = CliRunner().invoke(tune, ["read", str(path)]).output
        assert "no line of NCCL's in it" in told, name
        assert f"({len(content.decode(errors='replace').splitlines())} line" in told
        assert "none that matters" not in told


@pytest.mark.parametrize("option", ["--env", "--script"])
def test_lint_says_how_much_it_read(option: str, tmp_path: Path) -> None:
    path = tmp_path / "said.txt"
    for name, content in FOREIGN.items():
        path.write_bytes(content)
        result = CliRunner().invoke(tune, ["lint", option, str(path), "--nccl-version", "2.27.5"])
        told = f"{result.output} {result.exception}"
        assert "is not a NAME=VALUE" in told or "is not text" in told or "0 variables looked at" in told, name


@pytest.mark.parametrize(
    "cut", ["SwitchName=leaf2 Level=0 LinkSp", "SwitchName=leaf2 Nodes=n[05-0", "SwitchNa"]
)
def test_a_topology_that_ends_too_early_is_not_taken_for_a_whole_one(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(f"SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[01-04]\n{cut}")
    result = CliRunner().invoke(fabric, ["show", "--topology", str(path)])
    told = f"{result.output}{result.stderr} {result.exception}"
    assert f"{path}:2" in told


def test_tools_of_lustre_and_of_the_driver_that_say_something_else() -> None:
    for content in FOREIGN.values():
        text = content.decode(errors="replace")
        for parse in (parse_lfs_df, parse_getstripe, parse_lfs_project, parse_lfs_quota):
            with pytest.raises(LfsError):
                parse(text)
        assert [one.severity for one in judge_gpus(parse_gpu_health(text), 8)] == ["unknown"]
