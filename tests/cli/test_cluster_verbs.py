"""`hpcrun cluster` against stub commands that print captured outputs: what it writes, says and exits with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcrun.cli.cluster import app
from hpcrun.errors import EXIT_SITE, EXIT_USAGE, HpcrunError, SiteError, UsageError
from hpcrun.specs.cluster import ClusterSpec, load_cluster

ROOT = Path(__file__).parents[2]
CAPTURED = ROOT / "tests" / "data" / "slurm"
HEAVY = ("torch", "mpi4py", "numpy", "jinja2", "submitit")
CONFIG = """\
ClusterName             = lab
MpiDefault              = pmi2
SelectType              = select/cons_tres
TopologyPlugin          = topology/tree
"""
STUB = """\
#!/bin/sh
echo "$0 $*" >> {here}/asked
case "$*" in
  *--version*) cat {here}/version ;;
  *"show config"*) cat {here}/config ;;
  *"show partition"*) cat {here}/partitions ;;
  *"show node"*) cat {here}/nodes ;;
  *"show topology"*) printenv SLURM_TOPO_LEN; cat {here}/topology ;;
  *) cat {here}/sinfo-N ;;
esac
"""
FILES = {
    "version": "version",
    "partitions": "show-partition",
    "nodes": "show-nodes-oneline",
    "topology": "show-topology",
    "sinfo-N": "sinfo-N",
}


@pytest.fixture(params=["22.05.8", "25.11.7"])
def slurm(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a Slurm whose commands print its files, first on PATH."""
    here = tmp_path / "slurm"
    here.mkdir()
    for name, file in FILES.items():
        text = (CAPTURED / request.param / f"{file}.txt").read_text(encoding="utf-8").split("\n", 1)[1]
        (here / name).write_text(text.rpartition("[exit ")[0] or text, encoding="utf-8")
    (here / "config").write_text(CONFIG, encoding="utf-8")
    for command in ("scontrol", "sinfo"):
        write_command(here / command, STUB.format(here=here))
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    return here


def write_command(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site's directory, empty, and none of the user's."""
    place = tmp_path / "site"
    monkeypatch.setenv("HPCRUN_SITE", str(place))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return place


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def mistake(*arguments: str | Path) -> HpcrunError:
    """The one-line error that a command ends with."""
    result = run(*arguments)
    assert isinstance(result.exception, HpcrunError), result.exception
    assert "\n" not in str(result.exception)
    assert result.stdout == ""
    return result.exception


def drafted(site: Path) -> Path:
    """The file of a draft, at the site's place for profiles."""
    path = site / "profiles" / "lab.yaml"
    made = run("draft", "--out", path)
    assert (made.exit_code, made.stdout, made.stderr) == (0, f"{path}\n", "")
    return path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_draft_then_show_then_check(slurm: Path, site: Path) -> None:
    profile = load_cluster(drafted(site))
    assert (profile.name, profile.partitions["main"].gpus_per_node) == ("lab", 4)
    content = json.loads(run("show", "--json").stdout)
    assert content["schema_version"] == 2
    assert ClusterSpec.model_validate(content["cluster"]) == profile
    shown = site / "shown.yaml"
    shown.write_text(run("show", "lab").stdout, encoding="utf-8")
    assert load_cluster(shown) == profile
    checked = run("check")
    assert (checked.exit_code, checked.stdout, checked.stderr) == (0, "lab: ok\n", "")


def test_draft_prints_where_no_file_is_named(slurm: Path, site: Path) -> None:
    assert run("draft").stdout == drafted(site).read_text(encoding="utf-8")
    asked = (slurm / "asked").read_text(encoding="utf-8")
    assert "sinfo" not in asked, "scontrol has named the nodes"
    assert "-a show partition" in asked


def test_a_draft_as_json(slurm: Path, site: Path) -> None:
    path = drafted(site)
    content = json.loads(run("draft", "--json").stdout)
    assert (content["schema_version"], content["path"], content["unknown"]) == (2, None, {})
    assert ClusterSpec.model_validate(content["cluster"]) == load_cluster(path)
    assert content["text"] == path.read_text(encoding="utf-8")
    other = site / "other.yaml"
    assert json.loads(run("draft", "--json", "--out", other).stdout)["path"] == str(other)
    assert other.read_text(encoding="utf-8") == content["text"]


def test_draft_replaces_no_file_unasked(slurm: Path, site: Path) -> None:
    path = drafted(site)
    path.write_text("mine", encoding="utf-8")
    assert f"{path}: exists; --force replaces it" in str(mistake("draft", "--out", path))
    assert path.read_text(encoding="utf-8") == "mine"
    assert run("draft", "--out", path, "--force").exit_code == 0
    assert load_cluster(path).name == "lab"
    assert "cannot be written" in str(mistake("draft", "--out", "/proc/self/no/p.yaml"))


def test_check_prints_a_line_a_difference_and_exits_with_1(slurm: Path, site: Path) -> None:
    drafted(site)
    change(slurm / "nodes", "RealMemory=64000", "RealMemory=32000")
    change(slurm / "partitions", "PartitionName=main", "PartitionName=batch")
    change(slurm / "version", (slurm / "version").read_text(), "slurm 26.05.0\n")
    change(slurm / "config", "topology/tree", "topology/default")
    change(slurm / "topology", (slurm / "topology").read_text(), "")
    checked = run("check", "lab")
    assert checked.exit_code == 1
    lines = [line for line in checked.stdout.splitlines() if ".blk." not in line]
    assert [line.partition(":")[0] for line in lines] == [
        "slurm_version",
        "partitions.main",
        "topology.source",
    ]
    content = json.loads(run("check", "lab", "--json").stdout)
    assert (content["schema_version"], content["name"], content["ok"]) == (2, "lab", False)
    assert content["differences"] == checked.stdout.splitlines()


def test_check_reads_the_profile_s_own_lines(slurm: Path, site: Path) -> None:
    path = drafted(site)
    with path.open("a", encoding="utf-8") as file:
        file.write("setup: [umask 022, 'echo \"hi']\nteardown: [sync]\nmodules: {init: ['fi']}\n")
    checked = run("check")
    assert checked.exit_code == 1
    init, setup = checked.stdout.splitlines()
    assert init.startswith("modules.init: bash -n: line 1: syntax error near unexpected token `fi'")
    assert setup.startswith("setup: bash -n: line 2: unexpected EOF while looking for matching")
    content = json.loads(run("check", "--json").stdout)
    assert (content["ok"], content["broken"], content["differences"]) == (False, [init, setup], [])


def test_check_doubts_a_limit_of_minutes_that_looks_like_hours(slurm: Path, site: Path) -> None:
    path = drafted(site)
    change(path, "max_time: UNLIMITED", 'max_time: "4:00"')
    told = run("check").stderr
    assert "hpcrun: partitions.main.max_time: 4:00 is 4 minutes; write 4:00:00 for hours and minutes" in told
    warnings = json.loads(run("check", "--json").stdout)["warnings"]
    assert [f"hpcrun: {warning}" for warning in warnings] == told.splitlines()


def test_check_says_what_it_could_not_compare(slurm: Path, site: Path) -> None:
    path = drafted(site)
    (slurm / "topology").write_text("slurm_load_topo: refused\n", encoding="utf-8")
    (slurm / "config").write_text("ClusterName = lab\nSelectType = select/cons_tres\n", encoding="utf-8")
    checked = run("check")
    assert (checked.exit_code, checked.stdout) == (0, "lab: ok\n")
    assert checked.stderr == (
        "hpcrun: not compared: topology: unknown: `scontrol show topology` said: slurm_load_topo: refused\n"
    )
    assert len(json.loads(run("check", path, "--json").stdout)["unknown"]) == 1
    assert run("draft").stderr.startswith("hpcrun: topology: unknown: ")


def test_sinfo_is_asked_where_scontrol_names_no_node(slurm: Path, site: Path) -> None:
    expected = load_cluster(drafted(site))
    (slurm / "nodes").write_text("", encoding="utf-8")
    path = site / "second.yaml"
    run("draft", "--out", path)
    assert load_cluster(path) == expected


def test_another_cluster_is_asked_by_name(slurm: Path, site: Path) -> None:
    path = site / "far.yaml"
    assert run("draft", "--slurm-cluster", "far", "--out", path).exit_code == 0
    profile = load_cluster(path)
    assert (profile.name, profile.slurm_cluster) == ("far", "far")
    (slurm / "asked").unlink()
    assert run("check", path).exit_code == 0
    asked = (slurm / "asked").read_text(encoding="utf-8").splitlines()
    assert all(" -M far " in line for line in asked if "--version" not in line)
    assert "is not a cluster's name" in str(mistake("draft", "--slurm-cluster", "a b"))


def test_no_length_cuts_the_topology(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TOPO_LEN", "SwitchName=made-up")
    assert "switch: 3" in run("draft").stdout


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        (
            "config",
            "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)",
            "`scontrol show config`: slurm_load_ctl_conf error: Unable to contact slurm controller (connect"
            " failure); the controller does not answer",
        ),
        (
            "version",
            "scontrol: fatal: Could not establish a configuration source",
            "no Slurm configuration is found here",
        ),
        ("nodes", "slurm_load_node error: Socket timed out on send/recv operation", "try again in a moment"),
        ("partitions", "No partitions in the system", "named no partition: No partitions in the system"),
    ],
)
def test_a_slurm_that_does_not_answer(slurm: Path, name: str, answer: str, said: str) -> None:
    (slurm / name).write_text(f"{answer}\n", encoding="utf-8")
    error = mistake("draft")
    assert isinstance(error, SiteError)
    assert said in str(error)


def test_what_a_reason_says_is_no_trouble(slurm: Path, site: Path) -> None:
    nodes = (slurm / "nodes").read_text(encoding="utf-8").rstrip("\n")
    (slurm / "nodes").write_text(f"{nodes} Reason=error: Connection refused by its BMC\n", encoding="utf-8")
    drafted(site)


def test_a_command_that_hangs_is_ended(slurm: Path, site: Path) -> None:
    path = drafted(site)
    write_command(slurm / "scontrol", "#!/bin/sh\nsleep 100\n")
    for words in (["draft"], ["check", path]):
        error = mistake(*words, "--timeout", "0.2")
        assert (str(error), error.exit_code) == (
            "`scontrol --version` gave no answer in 0.2 s; it was ended; is the controller up, and is its"
            " slurm.conf found here?",
            EXIT_SITE,
        )


def test_no_slurm_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("name: a\n", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in (["draft"], ["check", profile]):
        error = mistake(*words)
        assert str(error).startswith(
            "scontrol: no such command, so there is no Slurm here; run this on a login"
        )
        assert error.exit_code == EXIT_SITE
    assert run("show", profile).exit_code == 0, "to look at a profile takes no Slurm"


def test_no_profile_and_no_such_profile(site: Path) -> None:
    for verb in ("show", "check"):
        error = mistake(verb)
        assert isinstance(error, UsageError)
        assert f"`hpcrun cluster draft --out {site}/profiles/NAME.yaml` writes one" in str(error)
    error = mistake("show", "lba")
    assert (str(error), error.exit_code) == (
        "lba: no profile of this name; there are: none",
        EXIT_USAGE,
    )


def test_the_command_exits_with_3_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hpcrun.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        f"    print('loaded', [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "cluster", "draft"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == EXIT_SITE
    assert done.stdout == ""
    assert re.fullmatch(r"hpcrun: scontrol: no such command, .*\nloaded \[\]\n", done.stderr) or re.fullmatch(
        r"loaded \[\]\nhpcrun: scontrol: no such command, .*\n", done.stderr
    )
