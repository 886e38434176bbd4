"""`hpcrun train` and what people get wrong: exit code 2, and one line a mistake that tells what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrun.cli.main import main
from hpcrun.errors import EXIT_USAGE, SiteError
from hpcrun.hydra import find_mpiexec
from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir

ROOT = Path(__file__).parents[2]
JOB = """\
name: t
model:
  preset: tiny
data:
  text: corpus.txt
  seq_len: 16
  holdout: 0
train:
  steps: 3
"""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}

Complain = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a sound job in it, where we are."""
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "empty").mkdir()
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    # The command holds signals back until it has started a world, which it never does here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield tmp_path
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def complain(capsys: pytest.CaptureFixture[str], runs_root: Path) -> Complain:
    """Train, be refused, and get the lines that say why."""

    def call(*words: str) -> list[str]:
        runs = sorted(runs_root.glob("*"))
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (EXIT_USAGE, "")
        assert sorted(runs_root.glob("*")) == runs, "a run directory was left behind"
        return lines_of(said.err)

    return call


def lines_of(text: str) -> list[str]:
    assert "Traceback" not in text
    lines = text.splitlines()
    assert all(line.startswith("hpcrun: ") for line in lines)
    return [line.removeprefix("hpcrun: ") for line in lines]


def check(lines: list[str], start: str, *parts: str) -> None:
    """One line, which starts with where and which key, and has all these parts in it."""
    (line,) = lines
    assert line.startswith(f"{start}: ")
    assert [part for part in parts if part not in line] == [], line


HERE = "command line"


@pytest.mark.parametrize(
    ("overrides", "start", "parts"),
    [
        (
            "parallel.tp=2 resources.ranks_per_node=3",
            f"{HERE} parallel",
            ["tp 2 is 2 ranks", "ranks_per_node 3 = 3", "change a degree"],
        ),
        ("resources.ranks_per_node=4", "job.yaml parallel", ["1 rank,", "ranks_per_node 4 = 4", "leave out"]),
        ("parallel.tp=8", f"{HERE} parallel.tp", ["8 does not divide", "heads 4", "kv_heads 2", "use 1, 2"]),
        ("parallel.tp=4", f"{HERE} parallel.tp", ["4 does not divide model.kv_heads 2", "use 1, 2"]),
        (
            "parallel.tp=2 model.hidden=65 model.head_dim=16",
            f"{HERE} parallel.tp",
            ["2 does not divide model.hidden 65", "use 1"],
        ),
        ("parallel.tp=2 model.vocab=257", f"{HERE} parallel.tp", ["2 does not divide model.vocab 257"]),
        ("parallel.tp=2 data.seq_len=17", f"{HERE} parallel.tp", ["2 does not divide data.seq_len 17"]),
        ("parallel.pp=5", f"{HERE} parallel.pp", ["pp 5 stages", "the model has 4", "fewer stages"]),
        (
            "parallel.dp_shard=2 train.mbs=2 train.gbs=6",
            f"{HERE} train.gbs",
            ["6 is not a multiple of mbs 2 × dp 2 = 4", "nearest is 8"],
        ),
        (
            "parallel.pp=4 parallel.microbatches=2",
            f"{HERE} parallel.schedule",
            ["1f1b needs at least pp 4 microbatches", "there are 2", "change train.gbs"],
        ),
        (
            "parallel.pp=2 parallel.schedule=interleaved parallel.microbatches=5",
            f"{HERE} parallel.schedule",
            ["cannot cut 5 microbatches", "a multiple of pp 2"],
        ),
        (
            "parallel.dp_shard=2 parallel.zero=0",
            f"{HERE} parallel.zero",
            ["dp_shard is 2", "dp_replicate instead, or zero 1, 2 or 3"],
        ),
        ("parallel.zero=3", f"{HERE} parallel.zero", ["3 needs dp_shard above 1, which is 1", "leave zero"]),
        ("model.heads=3", f"{HERE} model.heads", ["3 does not divide hidden 64", "or give head_dim"]),
        ("data.seq_len=9000", f"{HERE} data.seq_len", ["longer than model.context 8192", "at most 8192"]),
    ],
)
def test_a_layout_that_does_not_come_out_even(
    overrides: str, start: str, parts: list[str], complain: Complain
) -> None:
    check(complain("job.yaml", *overrides.split()), start, *parts)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("parallel.cp=2", ["2 is not available in this version", "leave it out"]),
        ("parallel.ep=2", ["2 is not available"]),
        ("resources.nodes=2", ["2 nodes cannot share 1 rank evenly", "use 1"]),
        ("resources.nodes=0", ["must be at least 1, not 0", "(nodes per attempt)"]),
        ("resources.gpus_per_node=-1", ["must be at least 0, not -1"]),
        ("resources.time=4:xx", ["'4:xx' is not a time; write 90m, 2h, 1d12h"]),
        ("resources.time='0'", ["0 is no limit at all to Slurm; write UNLIMITED"]),
        ("resources.mem=64Q", ["'64Q' is not an amount of memory; write 512M, 1.5G or 64GiB, or 0 for all"]),
        ("resources.exclude=n[3-1]", ["'n[3-1]' counts down from 3 to 1; write [1-3]"]),
        ("resources.exclude=@all", ["'@all' is not a host list; write names such as n01,n[03-08]"]),
        ("resources.partition=''", ["must not be empty", "Slurm partition"]),
        ('resources.account="a\\nb"', ['"a\\nb" is not allowed (Slurm account)']),
        ("resources.memory=1G", ["unknown key; did you mean mem? allowed: nodes, gpus_per_node"]),
        ("resources.sbatch.time=1h", ["has a key of its own, resources.time; use that"]),
        ("resources.sbatch.tim=1h", ["is short for time; write the option in full"]),
        ("resources.sbatch.dependency=afterok:1", ["has a key of its own, --after RUN"]),
        ("resources.sbatch.output=x", ["is set by hpcrun; leave it out"]),
        ("resources.sbatch.--comment=x", ['"--comment" is not allowed', "long names without dashes"]),
        ("resources.sbatch.Comment=x", ['"Comment" is not allowed']),
        (
            "resources.sbatch.contiguous=false",
            ["false is not a value", "true for one without a value", "null"],
        ),
        ("resources.sbatch.nice=1.5", ["must be text, a whole number, true or null, not a float"]),
        ('resources.sbatch.comment="a\\nb"', ["must be one line without control characters"]),
        ("modules=cuda", ['must be a list, not "cuda"', "cuda/12.4"]),
        ("python=python3", ['"python3" is not allowed', "an absolute path"]),
        ("cluster=a/b", ['"a/b" is not allowed', "letters, digits, . _ -"]),
        ("container=x.sif", ['must be a mapping of keys to values, not "x.sif"']),
        ("env.RANK='1'", ["is set for each rank", "leave it out"]),
        ("env.MASTER_PORT='1'", ["is set for each rank"]),
        ("env.SLURM_CPU_BIND=none", ["begin with SLURM_ are set by Slurm", "another name"]),
        ("env.PMI_RANK='1'", ["begin with PMI_ are set by MPI"]),
        ("env.HPCRUN_ROOT=x", ["begin with HPCRUN_ are set by hpcrun"]),
        ("env.A-B=x", ['"A-B" is not allowed', "letters, digits, _"]),
        ("secrets.WORLD_SIZE=x", ["is set for each rank"]),
        ("secrets.A=''", ["must not be empty", "NAME: PATH"]),
        ("secrets.A=3", ["must be text (put it in quotes), not 3"]),
        ("command=ls", ['must be a list, not "ls"']),
        ("command=[]", ["must have at least 1 items, not 0"]),
        ("command=['']", ["its first word is the program to run, and is empty"]),
        ("retry.max=2", ["unknown key; ", "allowed: time_limit, preemption, crash, hang, node, grace"]),
        ("retry.crash=-1", ["must be at least 0, not -1"]),
        ("retry.grace='0'", ["0 is no time to save in; write 1s to 18h, such as 2m"]),
        ("retry.grace=UNLIMITED", ["UNLIMITED is no time to save in"]),
        ("sweep.train=[1]", ["unknown key; allowed: grid, zip, list, throttle"]),
        ("train.stps=3", ["unknown key", "did you mean steps?", "allowed: steps, mbs, gbs, lr"]),
        ("train.steps=many", ['must be a whole number, not "many"', "(optimizer steps)"]),
        ("train.steps=2.5", ["must be a whole number, not 2.5"]),
        ("train.steps=", ["must be a whole number, not null"]),
        ("train.steps=0", ["must be at least 1, not 0"]),
        ("train.lr=.inf", ["must be a finite number"]),
        ("train.precision=fp16", ['"fp16" is not allowed', "allowed: fp32, bf16, fp64"]),
        ("parallel.tp=0", ["must be at least 1, not 0"]),
        ("parallel={tp: 2", ['must be a mapping of keys to values, not "{tp: 2"']),
        ("train.steps.x=3", ["train.steps is 3 and has no keys", "set it as a whole"]),
        ("name.x=1", ['name is "t" and has no keys']),
        ("env.A=1", ["must be text (put it in quotes), not 1"]),
        ("data=null", ["is missing; give text: PATH or tokens: FILE"]),
        ("data=corpus.txt", ['must be a mapping of keys to values, not "corpus.txt"', "text: PATH"]),
        ("model=null", ["is missing; give a preset (demo, tiny,", "hf: DIR"]),
        ("model=dmo", ['"dmo" is not known; did you mean demo? allowed: demo, tiny']),
        ("model.preset=x", ['"x" is not known; allowed: demo, tiny']),
    ],
)
def test_a_key_or_value_that_cannot_be(override: str, parts: list[str], complain: Complain) -> None:
    check(complain("job.yaml", override), f"{HERE} {override.partition('=')[0]}", *parts)


@pytest.mark.parametrize(
    ("section", "start", "parts"),
    [
        ("container: {}", "j.yaml:3 container.image", ["is missing (image file or URI"]),
        ("container: {image: a, workdir: b}", "j.yaml:3 container.workdir", ['"b" is not', "absolute path"]),
        (
            "container: {image: a, runtime: docker}",
            "j.yaml:3 container.runtime",
            ["allowed: pyxis, apptainer"],
        ),
        (
            "container:\n  image: a\n  mounts: [/a:/b, b]",
            "j.yaml:5 container.mounts.1",
            ["'b' is not a mount; write /SOURCE:/TARGET"],
        ),
        ("secrets: {A: x}\nenv: {A: y}", "j.yaml:3 secrets.A", ["stands in env too; leave it in one"]),
        (
            "device: cuda\nparallel: {tp: 2}\nresources: {gpus_per_node: 1}",
            "j.yaml:5 resources.gpus_per_node",
            ["1 is less than the 2 ranks on each node", "use 2 or more"],
        ),
        ("sweep:\n  grid: {train.lrr: [1]}", "j.yaml:4 sweep train.lrr", ["element 0: unknown key; did you"]),
    ],
)
def test_a_section_that_only_a_cluster_reads(
    section: str, start: str, parts: list[str], complain: Complain
) -> None:
    Path("j.yaml").write_text(f"{PLAIN}{section}\n")
    check(complain("j.yaml"), start, *parts)


def test_a_sweep_is_not_trained_here_and_now(complain: Complain) -> None:
    Path("j.yaml").write_text(f"{PLAIN}sweep: {{grid: {{train.seed: [1, 2]}}}}\n")
    check(complain("j.yaml"), "j.yaml:3 sweep", "`hpcrun submit`")


def test_a_secret_that_is_no_secret(complain: Complain, place: Path) -> None:
    Path("key").write_text("hush")
    Path("key").chmod(0o644)
    check(complain("job.yaml", "secrets.A=key"), f"{HERE} secrets.A", f"run: chmod 600 {place}/key")
    check(complain("job.yaml", "secrets.A=absent"), f"{HERE} secrets.A", "cannot be read: No such file")


def test_a_command_beside_what_it_takes_the_place_of(complain: Complain) -> None:
    Path("j.yaml").write_text(f"{PLAIN}command: [a]\ntrain: {{steps: 3}}\nparallel: {{zero: 1}}\n")
    assert complain("j.yaml") == [
        f"j.yaml:{line} {key}: cannot be combined with command, which trains by itself; leave one out"
        for line, key in enumerate(["model", "data", "", "train", "parallel.zero"], start=1)
        if key
    ]


def test_sizes_without_a_preset_are_asked_for_but_not_what_follows_from_them(complain: Complain) -> None:
    lines = complain("job.yaml", "model={layers: 2}")
    missing = [f"{HERE} model.{key}: is missing" for key in ("vocab", "hidden", "ffn", "heads", "kv_heads")]
    assert [line.partition(" (")[0] for line in lines] == missing


def test_an_unknown_section_in_an_override_is_not_blamed_on_the_file(complain: Complain) -> None:
    check(complain("job.yaml", "trian.steps=3"), f"{HERE} trian", "unknown key; did you mean train?")


@pytest.mark.parametrize(
    "word", ["train.steps", "other.yaml", "=3", ".=3", "train..steps=3", "train.=3", "train.steps = 3"]
)
def test_a_word_that_is_no_override(word: str, complain: Complain) -> None:
    check(
        complain("job.yaml", word),
        f'{HERE} "{word}"',
        "is not an override; write key.path=value, for instance",
    )


def test_an_option_that_does_not_exist(complain: Complain) -> None:
    (line,) = complain("job.yaml", "--steps=3")
    assert "No such option: --steps" in line
    assert "(see `hpcrun train --help`)" in line


PLAIN = "model: tiny\ndata: {text: corpus.txt}\n"


@pytest.mark.parametrize(
    ("text", "start", "parts"),
    [
        (
            f"{PLAIN}trian: {{steps: 3}}\n",
            "j.yaml:3 trian",
            ["unknown key; did you mean train? allowed: name"],
        ),
        (
            f"{PLAIN}train:\n  lr: 1\n  stps: 3\n",
            "j.yaml:5 train.stps",
            ["did you mean steps? allowed: steps"],
        ),
        (f"{PLAIN}train:\n  lr: 1\n  lr: 2\n", "j.yaml:5 train.lr", ["twice, first on line 4; remove one"]),
        (f"{PLAIN}data: {{text: x}}\n", "j.yaml:3 data", ["stands twice, first on line 2"]),
        (f"{PLAIN}train:\n  steps: no\n", "j.yaml:4 train.steps", ['must be a whole number, not "no"']),
        (f"{PLAIN}train:\n  warmup: 101\n", "j.yaml:4 train.warmup", ["101 is more than train.steps 100"]),
        (f"{PLAIN}train: 3\n", "j.yaml:3 train", ["must be a mapping of keys to values, not 3"]),
        (
            f"{PLAIN}name: a b\n",
            "j.yaml:3 name",
            ['"a b" is not allowed (name of the run: letters, digits, . _ -)'],
        ),
        (f"{PLAIN}parallel:\n  cp: 2\n", "j.yaml:4 parallel.cp", ["2 is not available in this version"]),
        ("data: {text: corpus.txt}\n", "j.yaml model", ["is missing; give a preset (demo, tiny"]),
        ("model: tiny\n", "j.yaml data", ["is missing; give text: PATH or tokens: FILE"]),
        (
            "model: tiny\ndata: {text: a, tokens: b}\n",
            "j.yaml:2 data",
            ["exactly one of text and tokens", "both"],
        ),
        ("", "j.yaml", ["is empty", "name: first-run"]),
        ("- model: tiny\n", "j.yaml", ["is a list", "write keys with values"]),
        ("tiny\n", "j.yaml", ["is a single value", "write keys with values"]),
        (f"{PLAIN}train: {{steps: 3\n", "j.yaml:4", ["is not valid YAML", "began on line 3", "'}'"]),
        (f"{PLAIN}train:\n\tsteps: 3\n", "j.yaml:4", ["is not valid YAML", "with spaces, not with tabs"]),
        (f"{PLAIN}train:\n  steps 3\n  lr: 1\n", "j.yaml:5", ["is not valid YAML", "check the indentation"]),
        (f"{PLAIN}name: a\0b\n", "j.yaml", ["is not valid YAML", "line 3 holds the character U+0000"]),
        (f"{PLAIN}---\nname: b\n", "j.yaml:3", ["is not valid YAML", "a single document"]),
        (f"{PLAIN}name: é\n".encode("latin-1"), "j.yaml", ["is not text in UTF-8"]),
        (PLAIN.encode("utf-16"), "j.yaml", ["is not text in UTF-8"]),
    ],
)
def test_a_job_file_that_is_not_right(
    text: str | bytes, start: str, parts: list[str], complain: Complain
) -> None:
    Path("j.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    check(complain("j.yaml"), start, *parts)


@pytest.mark.parametrize(
    ("words", "start", "part"),
    [
        ("absent.yaml", "absent.yaml", "no such file"),
        ("job.yaml/absent.yaml", "job.yaml/absent.yaml", "cannot be read: Not a directory"),
        ("empty", "empty", "cannot be read: Is a directory"),
        ("/proc/self/mem", "/proc/self/mem", "cannot be read: Input/output error"),
    ],
)
def test_a_job_file_that_cannot_be_read(words: str, start: str, part: str, complain: Complain) -> None:
    check(complain(words), start, part)


@pytest.mark.parametrize("words", ["", "train.steps=3"])
def test_no_job_file(words: str, complain: Complain) -> None:
    (line,) = complain(*words.split())
    assert line.startswith("no job file given; write `hpcrun train JOB.yaml")


def test_all_mistakes_are_told_at_once_each_with_its_place(complain: Complain) -> None:
    Path("j.yaml").write_text(
        "model: dmo\n"
        "data:\n  text: corpus.txt\n  seq_len: x\n"
        "parallel: {zero: 2, tpp: 2}\n"
        "train:\n  gbs: 0\n  warmup: 1\n"
        "checkpoint:\n  evry: 5\n"
        "moddel: 3\n"
    )
    assert [line.partition(": ")[0] for line in complain("j.yaml", "train.warmup=x", "nonsense")] == [
        'command line "nonsense"',
        "command line train.warmup",
        "j.yaml:1 model",
        "j.yaml:4 data.seq_len",
        "j.yaml:5 parallel.tpp",
        "j.yaml:7 train.gbs",
        "j.yaml:10 checkpoint.evry",
        "j.yaml:11 moddel",
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "parts"),
    [
        (["data.text=absent.txt"], "data.text", ["/absent.txt: does not exist"]),
        (["data.text=nothing.txt"], "data.text", ["/nothing.txt: is empty"]),
        (["data.text=empty"], "data.text", ["/empty: no file that matches '*' has anything in it"]),
        (["data.text=zeros.bin"], "data.text", ["/zeros.bin: no text in it", "NUL bytes"]),
        (["data.text=short.txt"], "data.text", ["4 tokens", "seq_len 16 takes 17", "a smaller seq_len"]),
        (["data={tokens: absent.bin}"], "data", ["/absent.bin: does not exist"]),
        (["data={tokens: empty}"], "data", ["/empty: is a directory", "use text for a directory"]),
        (["data={tokens: zeros.bin}"], "data", ["no zeros.bin.json next to it; set dtype: uint16 or uint32"]),
        (["data={tokens: zeros.bin, dtype: uint16}"], "data", ["101 bytes of uint16", "truncated"]),
        (["data={tokens: nothing.txt, dtype: uint16}"], "data", ["/nothing.txt: is empty"]),
    ],
)
def test_data_that_cannot_be_trained_on(
    overrides: list[str], key: str, parts: list[str], complain: Complain
) -> None:
    Path("nothing.txt").touch()
    Path("short.txt").write_text("abc")
    Path("zeros.bin").write_bytes(bytes(101))
    (line,) = complain("job.yaml", *overrides)
    assert line.startswith(f"{HERE} {key}")
    assert [part for part in parts if part not in line] == [], line


def test_data_is_looked_for_beside_the_job_file_and_its_line_is_named(complain: Complain) -> None:
    Path("corpus.txt").unlink()
    check(complain("job.yaml"), "job.yaml:5 data.text", f"{Path.cwd()}/corpus.txt: does not exist")


@pytest.mark.parametrize(("missing", "found"), [(1, "3361 bytes"), (400, "2962 bytes")])
def test_a_token_file_of_which_the_end_is_missing(
    missing: int, found: str, complain: Complain, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["data", "prepare", "corpus.txt", "--out", "t.bin"])
    capsys.readouterr()
    path = Path("t.bin")
    os.truncate(path, path.stat().st_size - missing)
    parts = [f"/t.bin: {found} of uint16", "its sidecar says 1681 tokens", "truncated", "prepare it again"]
    check(complain("job.yaml", "data.text=null", "data.tokens=t.bin"), f"{HERE} data.tokens", *parts)


@pytest.mark.parametrize(
    ("sidecar", "parts"),
    [
        ("{", ["/t.bin.json: is not JSON", "write it again with `hpcrun data prepare`"]),
        ('{"format_version": 1, "dtype": "uint16", "tokens": 9}', ["t.bin.json: vocab: is missing"]),
        ('{"format_version": 99}', ["format_version 99 was written by a newer hpcrun", "upgrade"]),
    ],
)
def test_a_sidecar_that_is_damaged(sidecar: str, parts: list[str], complain: Complain) -> None:
    Path("t.bin").write_bytes(bytes(2000))
    Path("t.bin.json").write_text(sidecar)
    check(complain("job.yaml", "data.text=null", "data.tokens=t.bin"), f"{HERE} data.tokens", *parts)


def test_a_vocabulary_that_the_data_exceeds(complain: Complain) -> None:
    parts = ["100 is less than the 256 of", "corpus.txt; use 256 or more"]
    check(complain("job.yaml", "model.vocab=100"), f"{HERE} model.vocab", *parts)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (None, ["/hf/config.json does not exist", "save_pretrained"]),
        ("{", ["/hf/config.json cannot be read"]),
        ("[]", ["/hf/config.json is not a JSON object"]),
        (CONFIG | {"model_type": "gpt2"}, ["model_type 'gpt2' is not supported; use llama or mistral"]),
        (CONFIG | {"hidden_act": "gelu"}, ["hidden_act 'gelu' is not supported, only 'silu'"]),
        (CONFIG | {"rope_scaling": {"rope_type": "yarn"}}, ["'yarn' is not supported; use llama3 or none"]),
        (CONFIG | {"vocab_size": "256"}, ["vocab_size must be a positive whole number, not '256'"]),
        ({key: CONFIG[key] for key in CONFIG if key != "hidden_size"}, ["config.json has no hidden_size"]),
    ],
)
def test_a_hugging_face_directory_that_is_no_model_of_ours(
    config: object, parts: list[str], complain: Complain
) -> None:
    Path("hf").mkdir()
    if config is not None:
        Path("hf/config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    check(complain("job.yaml", "model={hf: hf}"), f"{HERE} model.hf", *parts)


@pytest.mark.parametrize("left", [-1, 40, 5, 0])
def test_weights_that_are_truncated(left: int, complain: Complain, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy", reason="pip install 'hpcrun-slurm[train]'")
    safetensors = pytest.importorskip("safetensors.numpy", reason="pip install 'hpcrun-slurm[train]'")
    weights = Path("hf/model.safetensors")
    weights.parent.mkdir()
    Path("hf/config.json").write_text(json.dumps(CONFIG))
    check(
        complain("job.yaml", "model={hf: hf}"),
        f"{HERE} model.weights",
        "/hf: has neither model.safetensors nor model.safetensors.index.json",
    )
    safetensors.save_file(
        {"a": numpy.zeros(9, "float32"), "b": numpy.zeros(3, "float16")}, weights, metadata={"format": "np"}
    )
    whole = weights.stat().st_size
    with monkeypatch.context() as patch:
        patch.setenv("HPCRUN_ROOT", "job.yaml")
        assert "HPCRUN_ROOT" in complain("job.yaml", "model={hf: hf}")[0], "the weights were refused"
    os.truncate(weights, left % whole)
    parts = [
        "/hf/model.safetensors: is not a complete",
        f"has {left % whole} bytes",
        "truncated",
        "download or export it again",
    ]
    parts += [f"by its header it should have {whole}"] if left < 0 else []
    check(complain("job.yaml", "model={hf: hf}"), f"{HERE} model.weights", *parts)


def test_weights_that_are_no_directory(complain: Complain) -> None:
    for wrong, found in (
        ("absent", "is not a directory"),
        ("corpus.txt", "is not a directory"),
        ("x" * 300, "cannot be read: File name too long"),
    ):
        lines = complain("job.yaml", f"model.weights={wrong}")
        check(lines, f"{HERE} model.weights", f"/{wrong}", found, "with safetensors")


def test_a_root_where_no_run_directory_can_be_made(
    complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for root in ("corpus.txt", "corpus.txt/below/it"):
        monkeypatch.setenv("HPCRUN_ROOT", root)
        check(
            complain("job.yaml"), str(Path(root).absolute()), "corpus.txt is not a directory; set HPCRUN_ROOT"
        )
    for root in ("/proc/runs", "/proc/self/fd/runs", f"{Path.cwd()}/{'x' * 300}"):
        monkeypatch.setenv("HPCRUN_ROOT", root)
        # Only making it shows whether it can be made: what the run would be has been told by then.
        line = complain("job.yaml")[-1]
        assert line.startswith(f"{root}: ")
        assert "set HPCRUN_ROOT to a directory that you may write" in line


@pytest.fixture
def old_run() -> RunDir:
    run = create_run("old")
    run.spec.write_text(render_job(load_job(Path("job.yaml")).spec))
    return run


def test_a_run_that_does_not_exist(old_run: RunDir, complain: Complain) -> None:
    (line,) = complain("--resume", "absent")
    assert line.startswith("absent: no such run under ")
    assert f"newest: {old_run.id}" in line
    assert "`hpcrun list`" in line


def test_a_name_that_means_several_runs(old_run: RunDir, complain: Complain) -> None:
    other = create_run("old")
    other.spec.write_text(old_run.spec.read_text())
    check(complain("--resume", "old"), "old", "names 2 runs", old_run.id, other.id, "say which")


def test_a_run_and_a_job_file(old_run: RunDir, complain: Complain) -> None:
    check(complain("job.yaml", "--resume", old_run.id), "job.yaml", "takes the job from the run", "overrides")


def test_a_run_that_has_nothing_left_to_do(old_run: RunDir, complain: Complain) -> None:
    write_json(old_run.exit, {"status": "done", "step": 3})
    (line,) = complain("--resume", "old")
    assert line.startswith(f"{old_run.id} is done (3 of 3 steps)")
    assert line.endswith(f"--resume {old_run.id} train.steps=6")


def test_a_run_whose_files_are_damaged(old_run: RunDir, complain: Complain) -> None:
    whole = old_run.spec.read_text()
    old_run.spec.write_text(whole.replace("preset", "prset").replace("steps: 3", "stps: 3"))
    check(complain("--resume", "old"), f"{old_run.spec}:{line_of(old_run.spec, 'stps')} train.stps", "steps")
    old_run.spec.write_text(f"{whole}  x: [1\n")
    (line,) = complain("--resume", "old")
    assert line.startswith(f"{old_run.spec}:")
    assert "is not valid YAML" in line
    old_run.spec.write_text(whole)
    old_run.exit.write_text("{")
    check(complain("--resume", "old"), str(old_run.exit), "is damaged", "remove it")


def line_of(path: Path, word: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), start=1) if word in line)


def in_a_process(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("words", "root", "start"),
    [
        ("job.yaml train.stps=3", "runs", f"{HERE} train.stps: unknown key; did you mean steps?"),
        ("absent.yaml", "runs", "absent.yaml: no such file"),
        ("job.yaml", "job.yaml/runs", "{}/job.yaml/runs: no run directory can be made here: "),
    ],
)
@pytest.mark.process
def test_a_real_process_says_the_same(
    words: str, root: str, start: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRUN_ROOT", root)
    done = in_a_process(sys.executable, "-m", "hpcrun", "train", *words.split())
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    (line,) = lines_of(done.stderr)
    assert line.startswith(start.format(place))
    assert not (place / "runs").exists()


@pytest.mark.process
@pytest.mark.mpi
def test_a_world_of_another_size_is_refused_by_all_its_ranks(runs_root: Path) -> None:
    try:
        mpiexec = find_mpiexec()
    except SiteError as error:
        pytest.skip(str(error))
    done = in_a_process(mpiexec, "-n", "2", sys.executable, "-m", "hpcrun", "train", "job.yaml")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    check(lines_of(done.stderr), "job.yaml parallel", "takes 1 rank,", "this world has 2", "or start 1")
    assert list(runs_root.glob("*")) == []
