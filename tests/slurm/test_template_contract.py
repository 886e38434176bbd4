"""`check`: every point of the contract, broken once; and what the context refuses to hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpcrun.errors import SpecError
from hpcrun.slurm.contract import check_template, render_script, shipped_counterpart
from hpcrun.slurm.sbatch import render_submission_script
from hpcrun.slurm.script_context import ScriptContext, context_from_profile, describe_context, example_context
from hpcrun.slurm.template import TEMPLATE_SUFFIX, TemplateLibrary, read_template_source
from hpcrun.specs.cluster import ClusterSpec, load_cluster
from hpcrun.specs.shipped import shipped_file

JOBS = [
    "array",
    "command",
    "command-apptainer",
    "command-pyxis",
    "function",
    "train",
    "train-apptainer",
    "train-pyxis",
]


@pytest.fixture(autouse=True)
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with bash and no sbatch, whatever this machine has; commands can be added to it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "cat"):
        (folder / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def library(tmp_path: Path) -> TemplateLibrary:
    (tmp_path / "site").mkdir()
    return TemplateLibrary({"site": tmp_path / "site", "shipped": TemplateLibrary().directories["shipped"]})


Found = Callable[..., list[str]]


@pytest.fixture
def found(library: TemplateLibrary) -> Found:
    """Check a site's own template of some text, and get what is wrong with it."""

    def call(text: str, name: str = "mine", **options: Any) -> list[str]:
        folder = library.directories["site"]
        (folder / f"{name}{TEMPLATE_SUFFIX}").write_bytes(text.encode())
        problems = check_template(library, library.find(name), **options)
        return [str(problem).replace(f"{folder}/", "") for problem in problems]

    return call


def extends(block: str, text: str, base: str = "train") -> str:
    parent = f"shipped/{base}{TEMPLATE_SUFFIX}"
    return f'{{% extends "{parent}" %}}\n\n{{% block {block} %}}\n{text}\n{{% endblock %}}\n'


def test_every_template_that_is_shipped_is_here(library: TemplateLibrary) -> None:
    names = [one.name.removesuffix(TEMPLATE_SUFFIX) for one in library.shipped().templates()]
    assert names == sorted([*JOBS, "base"])


@pytest.mark.parametrize("name", [*JOBS, "base"])
def test_what_is_shipped_keeps_its_contract(name: str, library: TemplateLibrary) -> None:
    template = library.find(name)
    assert check_template(library, template) == []
    assert (
        check_template(library, template, load_cluster(shipped_file("profiles/example.yaml")), "25.11") == []
    )


def test_a_site_that_adds_to_blocks_keeps_the_contract(found: Found) -> None:
    text = extends("setup", "{{ super() }}\nulimit -l unlimited")
    text += "{% block directives %}\n{{ super() -}}\n#SBATCH --partition=gpu\n{% endblock %}\n"
    assert found(text) == []
    assert found(text.replace("train", "function"), "own") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            extends("setup", "{{ super() }}\n#SBATCH --partition=gpu"),
            "mine.sbatch.j2:5: sbatch ignores a directive after the first command: #SBATCH --partition=gpu",
        ),
        (
            extends("directives", "#SBATCH --output={{ stdout }}"),
            "mine.sbatch.j2:3: --output must be the job's pattern",
        ),
        (
            extends("directives", "{{ super() -}}\n#SBATCH --output=slurm-%j.out"),
            "mine.sbatch.j2:3: --output must be the job's pattern",
        ),
        (
            extends("directives", "{{ super() -}}\n#SBATCH --open-mode=truncate"),
            "mine.sbatch.j2:3: --open-mode=append is missing",
        ),
        (
            extends("directives", "{{ super() -}}\n#SBATCH --time=2:00:00"),
            "mine.sbatch.j2:3: --time must be the",
        ),
        (
            extends("directives", "{{ super() -}}\n#SBATCH --signal=USR2@60"),
            "mine.sbatch.j2:3: --signal=USR2@60 must be --signal=B:USR2@120: the batch shell must get it",
        ),
        (
            extends("directives", "{{ super() -}}\n#SBATCH --no-requeue"),
            "mine.sbatch.j2:3: --requeue is missing",
        ),
        (
            extends("directives", "{{ super() -}}\n#SBATCH --requeue"),
            "mine.sbatch.j2:3: --requeue is set although",
        ),
        (
            extends("directives", "{{ super() -}}\n#SBATCH --array=0-3", "array"),
            "mine.sbatch.j2:3: --array must be the job's: --array=0-39%8",
        ),
        (extends("launch", "echo\nstatus=0"), "mine.sbatch.j2:3: {{ launch }} must occur once"),
        (extends("launch", "# {{ launch }} &\nwait"), "mine.sbatch.j2:3: {{ launch }} must occur once"),
        (
            extends("launch", "{{ super() }}\n{{ launch }} &\nwait"),
            "mine.sbatch.j2:3: {{ launch }} must occur",
        ),
        (extends("signals", ""), "mine.sbatch.j2:3: no trap hands USR2 on to the command"),
        (
            extends("launch", "{{ launch }} &\nwait"),
            "mine.sbatch.j2:3: hpcrun_child=$! must follow the command",
        ),
        (
            extends("launch", "trap : USR1 USR2 TERM\n{{ launch }}\nwait"),
            "mine.sbatch.j2:3: the command must run in the background",
        ),
        (
            extends("launch", "trap : USR1 USR2 TERM\nsrun {{ launch }} &\nwait"),
            "mine.sbatch.j2:3: the command is the supervisor: it runs once, in the batch shell",
        ),
        (
            extends("setup", "{{ super() }}\n{{ launch }}"),
            "mine.sbatch.j2: {{ launch }} must occur once",
        ),
        (
            extends("setups", "ulimit -l unlimited"),
            "mine.sbatch.j2:3: the block setups is in no template that this extends, so no script would"
            " contain it; did you mean setup? there are: directives, environment, launch, setup, signals,"
            " teardown",
        ),
        (
            extends("setup", "{{ super() }}") + "\n\nulimit -l unlimited\n",
            "mine.sbatch.j2:8: this is outside of every block, so no script would contain it",
        ),
        (extends("setup", "{{ super() }}") + "{{ name }}", "mine.sbatch.j2:6: this is outside of every"),
        (extends("setup", 'echo "hi'), "mine.sbatch.j2: bash -n: the script: line "),
        (
            extends("launch", "srun {{ launch }}", "function"),
            "mine.sbatch.j2:3: the command is the supervisor: it runs once, in the batch shell, without srun",
        ),
        (
            extends("setup", "export HF_TOKEN=hf_0123456789"),
            "mine.sbatch.j2:4: HF_TOKEN is written out; secrets are read from a 0600 file",
        ),
        (extends("setup", "if true; then"), "mine.sbatch.j2: bash -n: the script: line "),
        (extends("setup", "echo {{ nodez }}"), "mine.sbatch.j2:4: 'nodez' is undefined"),
        (
            extends("setup", "echo {{ accepts('x') }}"),
            "mine.sbatch.j2:4: accepts: 'x' is not known; there are",
        ),
        (extends("setup", "echo a\r"), "mine.sbatch.j2 line 4: ends in a carriage return"),
        (extends("setup", "# {{ 'x' * 5000000 }}"), "the script has 500"),
        ("echo {{ launch }}\n", "mine.sbatch.j2: the script does not begin with #!/bin/bash"),
        ("#!/bin/sh\n", "mine.sbatch.j2: the script does not begin with #!/bin/bash"),
        ("#!/bin/bash\n", "mine.sbatch.j2: `export SUBMITIT_EXECUTOR=slurm` is missing"),
    ],
)
def test_each_point_of_the_contract(text: str, said: str, found: Found) -> None:
    lines = found(text)
    assert any(said in line for line in lines), [line[:200] for line in lines]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nodes=24", "--nodes must be the job's: --nodes=2, and not 24"),
        ("--nodes 24", "--nodes must be the job's: --nodes=2, and not 24"),
        ("-N 24", "--nodes must be the job's: --nodes=2, and not 24"),
        ("-N24", "--nodes must be the job's"),
        ("--ntasks-per-n=1", "--ntasks-per-node must be the job's"),
        ("--exclusive --nodes=24 # all of them", "--nodes must be the job's: --nodes=2, and not 24"),
        ("--ntasks-per-node=1", "--ntasks-per-node must be the job's: --ntasks-per-node=4, and not 1"),
        ("--ntasks=8", "--ntasks=8 must not be set: the run counts on its nodes and ranks"),
        ("-n 8", "--ntasks=8 must not be set"),
        ("--ntasks-per-gpu=1", "--ntasks-per-gpu=1 must not be set"),
        ("--array=1-3", "--array=1-3 must not be set: elements and their files are counted by it"),
        ("-a 1-3", "--array=1-3 must not be set"),
        ("-t 2:00:00", "--time must be the job's"),
        ("--time-min=10", "--time-min=10 must not be set: Slurm would shorten the job's time"),
        ("-M other", "--clusters=other must not be set"),
        ("-d singleton", "--dependency=singleton must not be set"),
        ("-o slurm.out", "--output must be the job's pattern"),
        ("--no-requeue", "--requeue is missing"),
    ],
)
def test_a_template_cannot_change_what_a_run_counts_on(line: str, said: str, found: Found) -> None:
    lines = found(extends("directives", f"{{{{ super() -}}}}\n#SBATCH {line}"))
    assert len(lines) == 1, lines
    assert f"mine.sbatch.j2:3: {said}" in lines[0]


def test_a_template_that_repeats_the_job_s_own_is_in_order(found: Found) -> None:
    own = "#SBATCH --nodes={{ directives.nodes }} --ntasks-per-node={{ directives['ntasks-per-node'] }}"
    assert found(extends("directives", f"{{{{ super() -}}}}\n{own}")) == []
    assert (
        found(extends("directives", "{{ super() -}}\n#SBATCH -q long -A proj --mem=0 --gres=gpu:8 -C h100"))
        == []
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--qos=long", ["the template's --qos=long replaces the job's --qos=normal"]),
        ("-q long", ["the template's --qos=long replaces the job's --qos=normal"]),
        (
            "-q long -A p2",
            ["--qos=long replaces the job's --qos=normal", "--account=p2 replaces the job's --account=p1"],
        ),
        ("--partition debug", ["--partition=debug replaces the job's --partition=gpu"]),
        ("-C a100", ["--constraint=a100 replaces the job's --constraint=h100"]),
        ("--mem-per-cpu=4G", ["--mem-per-cpu=4G replaces the job's --mem=100G"]),
        ("--gpus-per-node=4", ["--gpus-per-node=4 replaces the job's --gres=gpu:8"]),
        ("--exclusive=user", ["--exclusive=user replaces the job's --exclusive:"]),
        ("--qos=normal", []),
        ("--comment=hello --licenses=x", []),
        ("--gres=gpu:8", []),
    ],
)
def test_submit_tells_what_a_template_replaces(
    line: str, told: list[str], library: TemplateLibrary, tmp_path: Path
) -> None:
    name = f"mine{TEMPLATE_SUFFIX}"
    text = extends("directives", f"{{{{ super() -}}}}\n#SBATCH {line}", "command")
    (library.directories["site"] / name).write_text(text)
    template = library.find("mine")
    options = {"partition": "gpu", "account": "p1", "qos": "normal", "constraint": "h100"}
    asked = {**options, "nodes": 2, "mem": "100G", "gres": "gpu:8", "exclusive": True}
    context = example_context(library, template).model_copy(update={"directives": asked})
    notes: list[str] = []
    render_submission_script(library, template, context, tmp_path, note=notes.append)
    assert len(notes) == len(told)
    for note, words in zip(sorted(notes), sorted(told), strict=True):
        assert words in note
        assert note.startswith(f"{library.directories['site'] / name}")
        assert note.endswith("sbatch takes the last of two")


def test_bash_s_own_words_about_a_script_that_does_not_parse(found: Found) -> None:
    (line,) = found(extends("setup", "{{ super() }}\nfor x in a; done"))
    assert line.startswith("mine.sbatch.j2:5: bash -n: the script: line ")
    assert "syntax error near unexpected token `done'" in line


def test_blocks_that_a_template_adds_inside_of_others(found: Found) -> None:
    inner = "{% block own %}\ntrue\n{% endblock %}"
    assert found(extends("setup", f"{{{{ super() -}}}}\n{inner}")) == []
    assert found(extends("own", "false", "mine").replace("shipped", "site"), "yours") == []


def test_what_is_wrong_with_the_site_s_base_is_said_of_its_file(library: TemplateLibrary) -> None:
    path = library.directories["site"] / f"base{TEMPLATE_SUFFIX}"
    path.write_text(extends("environment", "{{ super() }}\nfor x in a; do", "base"))
    (problem,) = check_template(library, library.find("train"))
    assert problem.where == str(path)
    path.write_text(extends("setup", "{{ super() }}\nexit 0\n#SBATCH -p gpu", "base"))
    (problem,) = check_template(TemplateLibrary(library.directories), library.find("train"))
    assert problem.where == f"{path}:6"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('echo "hi', "bash -n: line 2: unexpected EOF"),
        ("#SBATCH --partition=gpu", "sbatch ignores a directive after the first command"),
    ],
)
def test_what_is_wrong_with_the_profile_s_lines_is_said_of_the_profile(
    line: str, said: str, found: Found
) -> None:
    cluster = ClusterSpec(name="here", setup=["true", line])
    (told,) = found(extends("launch", "{{ super() }}"), cluster=cluster)
    assert told.startswith(f"profile here setup: {said}")


def test_a_broken_script_is_not_submitted(library: TemplateLibrary) -> None:
    template = library.find("train")
    job = example_context(library, template, ClusterSpec(name="here", teardown=["if true; then"]))
    with pytest.raises(
        SpecError, match=r"^profile here teardown: bash -n: line 2: syntax error: unexpected end"
    ):
        render_submission_script(library, template, job, Path("/runs/r/submitit"))


def test_secrets_that_are_none(found: Found) -> None:
    lines = [
        "export HF_TOKEN=$TOKEN",
        'API_KEY="${KEY-}"',
        "export X_TOKEN_FILE=/a",
        "# MY_SECRET=abc",
        "PASSWORD=",
    ]
    assert found(extends("setup", "\n".join(lines))) == []


def test_the_value_of_a_secret_variable_of_the_caller(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    (line,) = found(extends("setup", "wandb login 0123456789abcdef"))
    assert line == "mine.sbatch.j2:4: the script contains the value of your variable WANDB_API_KEY"
    assert "0123456789abcdef" not in line


@pytest.mark.parametrize("answer", ["exit 0", "echo 'sbatch: error: invalid partition' >&2; exit 1"])
def test_sbatch_is_asked_where_there_is_one(
    answer: str, found: Found, no_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, seen = no_slurm / "sbatch", tmp_path / "seen"
    stub.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$1" "${{SLURM_JOB_ID-none}}" >{seen}; cat "$2" >>{seen}\n{answer}\n'
    )
    stub.chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    lines = found(extends("setup", "true"))
    assert seen.read_text().startswith("--test-only\nnone\n#!/bin/bash\n")
    if answer == "exit 0":
        assert lines == []
    else:
        assert [line.split("sbatch --")[1] for line in lines] == [
            "test-only: sbatch: error: invalid partition"
        ]


def test_a_site_s_base_changes_every_kind_of_job(library: TemplateLibrary) -> None:
    folder = library.directories["site"]
    (folder / f"base{TEMPLATE_SUFFIX}").write_text(
        extends("setup", "{{ super() -}}\nulimit -l unlimited", "base")
    )
    for name in JOBS:
        template = library.find(name)
        text = render_script(library, template, example_context(library, template))
        assert text.count("\nulimit -l unlimited\n") == 1
        assert check_template(library, template) == []
    assert shipped_counterpart(library, library.find("base")).origin == "shipped"


def test_what_the_profile_gives_and_the_release_decides(library: TemplateLibrary) -> None:
    cluster = load_cluster(shipped_file("profiles/example.yaml"))
    changed = cluster.model_copy(update={"setup": ["ulimit -l unlimited; $(true)"], "teardown": ["sync"]})
    assert context_from_profile(None) == {}
    template = library.find("train")
    old, new = (
        render_script(library, template, example_context(library, template, changed, version))
        for version in ("22.05", None)
    )
    assert "\nulimit -l unlimited; $(true)\n" in old, "the admin's lines stand as they are"
    assert old.endswith('sync\n\nexit "$status"\n') or "\nsync\n" in old
    assert "SRUN_CPUS_PER_TASK" in old
    assert "--segment" not in old
    assert "SRUN_CPUS_PER_TASK" not in new, "the profile's 24.05"
    assert "#SBATCH --segment=2\n" in new
    assert "#SBATCH --partition=gpu\n" in new


@pytest.mark.parametrize(
    "update",
    [
        {"name": "a\nb"},
        {"directives": {"comment": "a\n#SBATCH --uid=0"}},
        {"directives": {"comment": "a\rb"}},
        {"directives": {"comment x": "a"}},
        {"directives": {"comment=x\n": "a"}},
        {"directives": {"-p": "a"}},
        {"stdout": "a\nb"},
        {"run_dir": "relative"},
        {"run_dir": "/a\nb"},
        {"env": {"A B": "x"}},
        {"env": {"A": "x\0y"}},
        {"launch": []},
        {"launch": ["a\0"]},
        {"modules": ["--force"]},
        {"modules": ["gcc\ntouch x"]},
        {"array": {"indices": "0-3; touch x"}},
        {"container": {"runtime": "pyxis", "image": "a", "mounts": ["/a:/b,/c:/d"]}},
        {"container": {"runtime": "pyxis", "image": "a"}, "run_dir": "/a,b"},
        {"signal": "KILL"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_what_no_context_holds(update: dict[str, object]) -> None:
    sound = {"name": "a", "run_id": "a", "run_dir": "/a", "launch": ["a"], "stdout": "/a/%j_%t_log.out"}
    ScriptContext.model_validate(sound)
    with pytest.raises(ValidationError):
        ScriptContext.model_validate(sound | update)


def test_the_context_is_described_whole() -> None:
    rows = {name: (kind, meaning) for name, kind, meaning in describe_context()}
    assert set(ScriptContext.model_fields) <= set(rows)
    assert all(kind and meaning for kind, meaning in rows.values())
    assert rows["launch"][0] == "list"
    assert rows["array.offset"][0] == "integer"
    assert "segment" in rows["accepts(feature)"][1]


def test_no_template_is_written_for_another_system(library: TemplateLibrary) -> None:
    for template in library.shipped().templates():
        assert "\r" not in read_template_source(template)
        assert os.access(template.path, os.R_OK)
