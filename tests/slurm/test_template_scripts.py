"""The scripts, run by bash with stubs for Slurm's commands: no value is executed, signals arrive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.slurm.contract import render_script
from hpcrun.slurm.script_context import ScriptContext, example_context
from hpcrun.slurm.template import TEMPLATE_SUFFIX, TemplateLibrary
from hpcrun.specs.cluster import parse_cluster

HOSTILE = (
    "$(touch x)",
    "`touch x`",
    "; touch x",
    "a && touch x",
    "> x",
    "'; touch x; '",
    '"; touch x; "',
    "'\"'$(touch x)\"'\"",
    "\\$(touch x)",
    "a\\",
    "${x:=$(touch x)}",
    "é; touch x \u2028 \u00a0",
    "* ~ {a,b} #x !! <<END",
    "",
)
BROKEN = ("a\ntouch x\n", "END\ntouch x\n#", "a\r\ntouch x", "\ttouch x\x01")
"""With line breaks and control characters: allowed in arguments and environment, refused everywhere else."""
NAMES = [
    one.name.removesuffix(TEMPLATE_SUFFIX)
    for one in TemplateLibrary().shipped().templates()
    if one.name != f"base{TEMPLATE_SUFFIX}"
]

STUB = """#!/bin/bash
# srun: drop the options, run the command; everything else: note how it was called.
name=${0##*/}
if [[ $name == srun ]]; then
    printf '%s\\0' "$@" >"$SEEN/srun"
    while [[ $1 != */bin/launch ]]; do shift; done
    exec "$@"
fi
printf '%s\\0' "$@" >"$SEEN/$name"
[[ $name != launch ]] || env -0 >"$SEEN/env"
[[ $name != scontrol ]] || printf 'nodeA\\nnodeB001\\n'
"""


class Bench:
    """A directory with stubs, where a script runs."""

    def __init__(self, place: Path) -> None:
        self.work, self.bin, self.seen = place / "work", place / "bin", place / "seen"
        for folder in (self.work, self.bin, self.seen):
            folder.mkdir()
        for name in ("srun", "scontrol", "module", "launch"):
            self.stub(name, STUB)
        self.env = {"PATH": f"{self.bin}:/usr/bin:/bin", "SEEN": str(self.seen), "LC_ALL": "C"}
        self.env |= {
            "SLURM_JOB_ID": "123456",
            "SLURM_ARRAY_TASK_ID": "7",
            "SLURM_JOB_NODELIST": "nodeA,nodeB001",
        }

    def stub(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, script: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["bash", "/dev/stdin"],
            input=script.encode(),
            cwd=self.work,
            env=self.env,
            capture_output=True,
            check=False,
            timeout=30,
        )

    def words(self, name: str) -> list[str]:
        return (self.seen / name).read_bytes().decode().split("\0")[:-1]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def context(kind: str, bench: Bench, **update: Any) -> tuple[TemplateLibrary, ScriptContext]:
    library = TemplateLibrary().shipped()
    job = example_context(library, library.find(kind)).model_dump()
    return library, ScriptContext.model_validate(job | {"modules": []} | update)


def sbatch_words(line: str) -> list[str]:
    """The words of a directive as sbatch takes them apart (its own rules, not the shell's)."""
    words: list[str] = []
    word, quoting, escaped = "", "", False
    for character in line.removeprefix("#SBATCH").strip() + " ":
        if escaped and character != " ":
            word, escaped = word + character, False
        elif character == "\\":
            escaped = True
        elif quoting:
            quoting, word = ("", word) if character == quoting else (quoting, word + character)
        elif character in "'\"":
            quoting = character
        elif character == "#":
            break
        elif character.isspace():
            words, word, escaped = [*words, word] if word else words, "", False
        else:
            word += character
    assert not quoting
    return [*words, word] if word else words


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_a_value_is_run_and_every_value_arrives(name: str, bench: Bench, tmp_path: Path) -> None:
    run_dir = tmp_path / "run $(touch x) 'q' \"d\" é; touch x"
    run_dir.mkdir()
    values = [*HOSTILE, *BROKEN]
    lines = [value.replace(",", "") for value in HOSTILE if value]
    launch = [str(bench.bin / "launch"), *values]
    directives: dict[str, Any] = {f"option-{chr(97 + i)}": v for i, v in enumerate(HOSTILE) if "`" not in v}
    library, job = context(
        name,
        bench,
        name=lines[0],
        run_id=lines[0],
        run_dir=str(run_dir),
        stdout=f"{run_dir}/%j_%t_log.out",
        stderr=f"{run_dir}/%j_%t_log.err",
        launch=launch,
        directives=directives,
        modules=[line for line in lines if line[0] not in " -"],
        env={f"V{i}": value for i, value in enumerate(values)},
        container={
            "runtime": "pyxis" if "pyxis" in name else "apptainer",
            "image": lines[0],
            "mounts": lines,
            "workdir": lines[2],
            "options": lines,
        },
    )
    script = render_script(library, library.find(name), job)
    done = bench.run(script)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert list(bench.work.iterdir()) == []
    assert list(run_dir.iterdir()) == []
    assert bench.words("launch") == values
    environ = dict(entry.partition("=")[::2] for entry in bench.words("env"))
    assert [environ[f"V{i}"] for i in range(len(values))] == values
    assert bench.words("module") == ["load", job.modules[-1]]
    told = [sbatch_words(line) for line in script.split("\n") if line.startswith("#SBATCH")]
    for option, value in directives.items():
        assert [f"--{option}={value}"] in told
    assert [f"--output={run_dir}/%j_0_log.out"] in told


@pytest.mark.parametrize("value", BROKEN)
def test_a_directive_with_a_line_break_is_refused_whoever_writes_it(value: str, tmp_path: Path) -> None:
    (tmp_path / f"mine{TEMPLATE_SUFFIX}").write_text(
        f'{{% extends "shipped/train{TEMPLATE_SUFFIX}" %}}\n{{% block directives %}}\n{{{{ super() -}}}}\n'
        "#SBATCH --comment={{ env.NOTE }}\n{% endblock %}\n"
    )
    library = TemplateLibrary({"site": tmp_path, **TemplateLibrary().shipped().directories})
    template = library.find("mine")
    job = example_context(library, template)
    sound = job.model_copy(update={"env": {"NOTE": "a\\$'b $' c"}})
    assert ["--comment=a\\$'b $' c"] in map(
        sbatch_words, render_script(library, template, sound).splitlines()
    )
    with pytest.raises(UsageError, match=rf"mine\{TEMPLATE_SUFFIX}:4: a directive must not contain a line"):
        render_script(library, template, job.model_copy(update={"env": {"NOTE": f"\\{value}"}}))


def test_the_site_s_mpi_is_told_as_it_stands(bench: Bench, tmp_path: Path) -> None:
    text = "name: a\nmpi: {libmpi: '/opt/$(touch x)/libmpi.so'}\n"
    launch, cluster = [str(bench.bin / "launch")], parse_cluster(text, "p.yaml")
    library, job = context("command", bench, run_dir=str(tmp_path), launch=launch, cluster=cluster)
    assert bench.run(render_script(library, library.find("command"), job)).returncode == 0
    assert "MPI4PY_LIBMPI=/opt/$(touch x)/libmpi.so" in bench.words("env")
    assert list(bench.work.iterdir()) == []


def test_an_array_s_element_and_its_number(bench: Bench) -> None:
    launch = [str(bench.bin / "launch")]
    library, job = context("array", bench, launch=launch, array={"indices": "0-9", "offset": 1000})
    assert bench.run(render_script(library, library.find("array"), job)).returncode == 0
    assert "HPCRUN_ELEMENT=1007" in bench.words("env")


@pytest.mark.parametrize("code", [0, 5, 75, 127])
def test_the_exit_code_is_the_command_s(code: int, bench: Bench) -> None:
    launch = bench.stub("launch", f"#!/bin/bash\nexit {code}\n")
    library, job = context(
        "train", bench, launch=[str(launch)], teardown_lines=['touch "$SEEN/after"', "false"]
    )
    assert bench.run(render_script(library, library.find("train"), job)).returncode == code
    assert (bench.seen / "after").exists()


def test_a_module_that_cannot_be_loaded_ends_the_job(bench: Bench) -> None:
    bench.stub("module", "#!/bin/bash\nexit 1\n")
    library, job = context("train", bench, launch=[str(bench.bin / "launch")], modules=["gcc/1"])
    done = bench.run(render_script(library, library.find("train"), job))
    assert (done.returncode, done.stderr) == (3, b"hpcrun: the module gcc/1 cannot be loaded\n")
    assert not (bench.seen / "launch").exists()


WAITS = """
import os, pathlib, signal, sys, time
seen = pathlib.Path(os.environ["SEEN"])
def note(number, frame):
    with open(seen / "signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number == signal.SIGTERM:
        time.sleep(0.1)
        sys.exit(75)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, note)
(seen / "ready").touch()
while True:
    time.sleep(0.01)
"""


def until(path: Path, text: str = "") -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path} never held {text!r}"
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["train", "array", "command-apptainer"])
def test_signals_of_the_batch_shell_reach_the_command(name: str, bench: Bench, tmp_path: Path) -> None:
    launch = [sys.executable, "-S", "-c", WAITS]
    lines = ['touch "$SEEN/after"']
    library, job = context(name, bench, run_dir=str(tmp_path), launch=launch, teardown_lines=lines)
    script = tmp_path / "script.sh"
    script.write_text(render_script(library, library.find(name), job))
    child = subprocess.Popen(["bash", str(script)], cwd=bench.work, env=os.environ | bench.env)
    try:
        until(bench.seen / "ready")
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
            child.send_signal(number)
            until(bench.seen / "signals", number.name)
        assert child.wait(timeout=60) == 75
    finally:
        child.kill()
    assert (bench.seen / "signals").read_text().split() == ["SIGUSR2", "SIGUSR1", "SIGTERM"]
    assert (bench.seen / "after").exists()


@pytest.mark.parametrize("setup", ["true", "set -eu; IFS=,", "child=1; early=1; forward() { false; }"])
def test_signals_that_come_while_the_job_is_prepared_are_kept_for_the_command(
    setup: str, bench: Bench, tmp_path: Path
) -> None:
    prepares = 'touch "$SEEN/preparing"; until [[ -e $SEEN/go ]]; do sleep 0.01; done'
    library, job = context(
        "train",
        bench,
        run_dir=str(tmp_path),
        launch=[sys.executable, "-S", "-c", WAITS],
        setup_lines=[setup, prepares],
        teardown_lines=['touch "$SEEN/after"'],
    )
    script = tmp_path / "script.sh"
    script.write_text(render_script(library, library.find("train"), job))
    child = subprocess.Popen(
        ["bash", str(script)],
        cwd=bench.work,
        env=os.environ | bench.env,
    )
    try:
        until(bench.seen / "preparing")
        child.send_signal(signal.SIGUSR2)
        (bench.seen / "go").touch()
        until(bench.seen / "signals", "SIGUSR2")
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 75
    finally:
        child.kill()
    assert (bench.seen / "after").exists()


def test_directives_are_taken_apart_as_sbatch_does() -> None:
    # A blank ends a word even behind a backslash (seen with sbatch 22.05).
    assert sbatch_words("#SBATCH --a=b\\ c 'd e' \"f'g\" h#i") == ["--a=b", "c", "d e", "f'g", "h"]
