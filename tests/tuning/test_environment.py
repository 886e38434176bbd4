"""Where settings come from: scripts against a real bash, dumps of a real env, files as NCCL reads them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.tuning.lint.environment import (
    EnvironmentLayer,
    VariableAssignment,
    effective_assignments,
    layer_from_environment,
    parse_environment_dump,
    parse_nccl_conf,
    read_user_file,
    resolve_layers,
)
from hpcrun.tuning.lint.script_exports import drops_shell_environment, parse_script_exports

DATA = Path(__file__).parents[1] / "data" / "tuning"
NAMES = ["NCCL_A", "NCCL_B", "NCCL_C", "NCCL_D"]
VALUES = [
    "1",
    "'a b'",
    '"c,d"',
    "=mlx5_0,mlx5_1",
    "x=y",
    "",
    "^docker",
    "'^=eth0'",
    r"a\ b",
    '"q\'q"',
    "ring\\;tree",
]


def line_of_script(dice: random.Random) -> str:
    name, other = dice.sample(NAMES, 2)
    value, second = dice.choices(VALUES, k=2)
    return dice.choice(
        [
            f"export {name}={value}",
            f"export {name}={value} {other}={second}",
            f"{name}={value}",
            f"{name}={value}; export {name}",
            f"declare -x {name}={value}",
            f"unset {name}",
            f"export {name}={value} && {other}={second}",
            f"  export {name}={value}   # {other}={second}",
            f"if true; then export {name}={value}; fi",
            f"export {name}=\\\n{value}",
            f"cat > /dev/null <<EOF\nexport {name}=document\nEOF",
            f"# export {name}={value}",
            f"set -a; {name}={value}; set +a",
            f"echo 'export {name}=quoted' > /dev/null",
        ]
    )


def from_bash(script: str, environ: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\nenv -0"],
        env=environ | {"PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
        timeout=30,
    )
    pairs = (one.partition("=") for one in done.stdout.decode().split("\0") if one)
    return {name: value for name, _, value in pairs if name in NAMES}


def found(*layers: EnvironmentLayer) -> dict[str, str | None]:
    return {name: one.value for name, one in effective_assignments(resolve_layers(layers)).items()}


@pytest.mark.process
def test_scripts_export_what_bash_says() -> None:
    dice = random.Random(8)
    for _ in range(60):
        script = "\n".join(line_of_script(dice) for _ in range(dice.randint(1, 8)))
        environ = {name: "shell" for name in NAMES if dice.random() < 0.3}
        assert found(
            layer_from_environment(environ), parse_script_exports(script, "job.sbatch")
        ) == from_bash(script, environ), script


def test_a_script_as_people_write_them() -> None:
    layer = parse_script_exports((DATA / "job.sbatch").read_text(encoding="utf-8"), "job.sbatch")
    settings = {one.name: one for one in layer.settings if one.is_exported}
    assert {name: one.value for name, one in settings.items()} == {
        "NCCL_CROSS_NIC": "0",
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "NCCL_SOCKET_IFNAME": "bond0",
        "NCCL_IB_SL": None,
        "NCCL_DEBUG_FILE": None,
        "NCCL_P2P_LEVEL": "nvl",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_BUFFSIZE": "8388608",
    }
    assert [one.name for one in layer.settings if not one.is_exported] == ["NCCL_IB_TIMEOUT"]
    assert settings["NCCL_DEBUG"].where == "job.sbatch:9"
    assert settings["NCCL_BUFFSIZE"].where == "job.sbatch:23"
    assert list(layer.removed) == ["NCCL_NVLS_ENABLE"]
    assert [note.partition(" sets")[0] for note in layer.notes] == [
        "job.sbatch:6: what `module load cuda/12.4`",
        "job.sbatch:7: what `source /opt/site/env.sh`",
        "job.sbatch:19: NCCL_FROM_A_DOCUMENT stands here in a form that was not looked into",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mpirun -x NCCL_A=1 -x NCCL_B -np 4 ./a", {"NCCL_A": "1"}),
        ("mpiexec -genv NCCL_A 2 ./a", {"NCCL_A": "2"}),
        ("srun --export=ALL,NCCL_A=3 ./a", {"NCCL_A": "3"}),
        ("apptainer exec --env NCCL_A=4,NCCL_B=5 i.sif ./a", {"NCCL_A": "4", "NCCL_B": "5"}),
        ("env NCCL_A=6 ./a", {"NCCL_A": "6"}),
        ("#SBATCH --export=ALL,NCCL_A=7", {"NCCL_A": "7"}),
        ("export NCCL_A=$(hostname)", {"NCCL_A": None}),
        ("export NCCL_A+=x", {"NCCL_A": None}),
        ("export NCCL_A=1\nunset NCCL_A\nNCCL_A=2", {}),
        ("export NCCL_A=1\nunset NCCL_A\nNCCL_A=2\nexport NCCL_A", {"NCCL_A": "2"}),
        ("export NCCL_A=1\nexport -n NCCL_A", {}),
        ("echo 'cat <<EOF'\nexport NCCL_A=1", {"NCCL_A": "1"}),
        ("x=$((1 << n))\nexport NCCL_A=1", {"NCCL_A": "1"}),
        ("run() { export NCCL_A=1; }", {"NCCL_A": "1"}),
        ("[[ -n $x ]] && export NCCL_A=1", {"NCCL_A": "1"}),
        ("/usr/bin/srun --export ALL,NCCL_A=8 ./a", {"NCCL_A": "8"}),
    ],
)
def test_further_ways_to_set_a_variable(line: str, expected: dict[str, str | None]) -> None:
    assert found(parse_script_exports(line, "s")) == expected


@pytest.mark.parametrize(
    ("line", "drops"),
    [
        ("#SBATCH --export=NONE", True),
        ("#SBATCH --export=NIL", True),
        ("#SBATCH --export=NCCL_A=1", True),
        ("#SBATCH --export=ALL", False),
        ("#SBATCH -N 2 --export ALL,X=1", False),
        ("echo --export=NONE", False),
        ("", False),
    ],
)
def test_whether_the_shell_s_environment_gets_in(line: str, drops: bool) -> None:
    assert drops_shell_environment(f"#!/bin/bash\n{line}\n") is drops


ODD = {"NCCL_A": "two\nlines", "NCCL_B": "=mlx5_0,mlx5_1", "NCCL_C": 'with "quotes" and $', "NCCL_D": "it's"}


@pytest.mark.parametrize("command", ["env", "env -0", "export -p"])
@pytest.mark.process
def test_dumps_of_an_environment(command: str) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", command], env=ODD, capture_output=True, check=True, timeout=30, text=True
    )
    values = {one.name: one.value for one in parse_environment_dump(done.stdout, "dump", "env").settings}
    assert {name: values[name] for name in NAMES} == ODD


@pytest.mark.process
def test_exported_functions_are_no_trouble() -> None:
    script = "export NCCL_A=1; ml() { echo hello; }; export -f ml; "
    for command in ("env", "env -0"):
        done = subprocess.run(
            ["bash", "--norc", "-c", script + command],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            check=True,
        )
        values = {
            one.name: one.value
            for one in parse_environment_dump(done.stdout.decode(), "dump", "env").settings
        }
        assert values["NCCL_A"] == "1"


def test_the_environment_of_an_image() -> None:
    layer = parse_environment_dump(
        (DATA / "image.json").read_text(encoding="utf-8"), "image.json", "container"
    )
    assert [one.name for one in layer.settings] == ["PATH", "NCCL_VERSION", "NCCL_DEBUG", "LD_LIBRARY_PATH"]
    direct = json.dumps({"config": {"Env": ["A=b"]}})
    assert found(parse_environment_dump(direct, "x", "container")) == {"A": "b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "begins like JSON"),
        ('{"Config": {}}', "holds no list"),
        ("[1, 2]", "holds no list"),
        ("NCCL_A: 1", "x:1: 'NCCL_A: 1' is not a NAME=VALUE"),
        ("[" * 100_000, "begins like JSON"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_environment_dump(text, "x", "env")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_told_in_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\0")
    for path, words in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "cannot be read"),
        (binary, "not text"),
    ):
        with pytest.raises(UsageError, match=words):
            read_user_file(path)


def test_a_configuration_file_is_read_as_nccl_reads_it() -> None:
    layer = parse_nccl_conf(read_user_file(DATA / "nccl-broken.conf"), "nccl.conf")
    told = {
        (one.name, fault.severity, fault.text.partition(";")[0])
        for one in layer.settings
        for fault in one.faults
    }
    assert told == {
        ("NCCL_DEBUG", "error", "this is not a shell: `export` becomes part of the name"),
        ("NCCL_IB_TC", "error", "the blank is part of the name"),
        ("NCCL_IB_TC", "warning", "the blank is part of the value"),
        ("NCCL_SOCKET_IFNAME", "error", "the quotes are part of the value"),
        ("# indented", "error", "has no `=` and is passed over"),
        ("NCCL_IB_SL", "error", "a comment behind the value is part of it"),
        ("NCCL_TOPO_FILE", "error", "this is not a shell: $ is not replaced"),
        ("NCCL_NVLS_ENABLE", "error", "has no `=` and is passed over"),
        (
            "NCCL_IB_TIMEOUT",
            "warning",
            "the line ends as on Windows, and that end is part of the value before NCCL 2.30",
        ),
    }
    counts = effective_assignments(resolve_layers([layer]))
    assert set(counts) == {"NCCL_SOCKET_IFNAME", "NCCL_IB_SL", "NCCL_TOPO_FILE", "NCCL_IB_TIMEOUT"}
    assert counts["NCCL_IB_SL"].value == "1   # for adaptive routing"


def setting(name: str, value: str, where: str) -> VariableAssignment:
    return VariableAssignment(name, value, where, where)


def test_who_wins() -> None:
    shell = EnvironmentLayer("shell", (setting("A", "1", "shell"), setting("B", "1", "shell")))
    script = EnvironmentLayer("script", (setting("A", "2", "s:1"),), {"B": "s:2"})
    user = EnvironmentLayer("user", (setting("A", "3", "u:1"), setting("C", "3", "u:2")), fills=True)
    site = EnvironmentLayer("site", (setting("C", "4", "/etc:1"), setting("D", "4", "/etc:2")), fills=True)
    chains = resolve_layers([shell, script, user, site])
    assert {name: one.value for name, one in effective_assignments(chains).items()} == {
        "A": "2",
        "C": "3",
        "D": "4",
    }
    assert [fate for _, fate in chains["A"].steps] == [
        "replaced at s:1",
        "counts",
        "not looked at: s:1 sets it",
    ]
    assert [fate for _, fate in chains["B"].steps] == ["taken away at s:2"]
    assert [fate for _, fate in chains["C"].steps] == ["counts", "not looked at: u:2 sets it"]


def test_any_text_gives_a_layer_or_one_line() -> None:
    dice = random.Random(9)
    pieces = [
        "export ",
        "NCCL_A=",
        "'",
        '"',
        "\n",
        "\\",
        "$(",
        "<<EOF",
        "EOF",
        "=",
        "#",
        ";",
        "\0",
        "é",
        "{",
        "unset ",
    ]
    for _ in range(1500):
        text = "".join(dice.choices(pieces, k=dice.randint(1, 25)))
        resolve_layers([parse_script_exports(text, "s"), parse_nccl_conf(text, "c")])
        with contextlib.suppress(UsageError):
            resolve_layers([parse_environment_dump(text, "d", "env")])
