"""Job files: overrides, presets, every mistake at once with its line, the round trip, hostile input."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from hpcrun.errors import SpecError, UsageError
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import flatten_keys, job_schema, load_job, parse_job, render_job
from hpcrun.specs.resources import RetrySpec
from hpcrun.specs.shipped import shipped_file

JOB = """\
name: first-run
model: {preset: demo, layers: 6}
data:
  text: python-stdlib
  seq_len: 128
parallel:
  pp: 2
  dp_shard: 2
  tp: 2
  schedule: interleaved
train:
  steps: 20
  mbs: 2
  gbs: 16
  lr: 3e-4
  betas: [0.9, 0.99]
  lr_scaling: {rule: sqrt, base_gbs: 8}
  eval: {every: 5}
checkpoint:
  every: 10
env:
  OMP_NUM_THREADS: "1"
"""


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml", overrides)
    return [str(problem) for problem in caught.value.problems]


def with_line(text: str, *lines: str) -> str:
    return text + "".join(f"{line}\n" for line in lines)


def test_a_job_is_resolved_with_defaults_and_a_plan() -> None:
    job = parse_job(JOB, "job.yaml")
    model, parallel = job.spec.model, job.spec.parallel
    assert model is not None
    assert (model.layers, model.hidden, model.head_dim) == (6, 128, 32)
    assert (parallel.zero, parallel.virtual_stages, parallel.microbatches) == (1, 2, 4)
    assert (job.training_plan.gbs, job.training_plan.grad_accum, job.training_plan.seq_len) == (16, 4, 128)
    assert job.spec.train.betas == [0.9, 0.99]
    assert job.spec.device == "auto"


def test_overrides_are_typed_like_the_file_and_the_last_wins() -> None:
    overrides = ["train.steps=7", "train.steps=9", "train.betas=[0.8, 0.9]", "model=tiny", "model.layers=8"]
    overrides += ["checkpoint=", "name=012", "train.lr_scaling=null", "env.A='1'", "env.B=no"]
    spec = parse_job(JOB, "job.yaml", overrides).spec
    assert spec.model is not None
    assert (spec.train.steps, spec.train.betas, spec.train.lr_scaling) == (9, [0.8, 0.9], None)
    assert (spec.model.layers, spec.model.hidden) == (8, 64)
    assert (spec.checkpoint.every, spec.name) == ("auto", "012")
    assert spec.env == {"OMP_NUM_THREADS": "1", "A": "1", "B": "no"}


def test_a_size_beside_a_preset_wins_and_sizes_alone_are_enough() -> None:
    sizes = "{vocab: 64, hidden: 32, ffn: 64, layers: 2, heads: 2, kv_heads: 1}"
    spec = parse_job(f"model: {sizes}\ndata: {{text: x}}", "j").spec
    assert spec.model is not None
    assert (spec.model.hidden, spec.model.head_dim) == (32, 16)


def test_a_hugging_face_directory_gives_sizes_and_weights(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(config))
    (tmp_path / "job.yaml").write_text("model:\n  hf: tiny\n  layers: 3\n  context: 512\ndata: {text: .}\n")
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / "job.yaml")
    place = f"{tmp_path}/job.yaml:3 model.layers"
    assert (
        str(caught.value)
        == f"{place}: cannot be combined with model.hf, which says 2; leave one of the two out"
    )
    job = load_job(tmp_path / "job.yaml", ["model.layers=2"])
    assert job.spec.model is not None
    assert (job.spec.model.layers, job.spec.model.weights) == (2, str(tmp_path / "tiny"))
    assert parse_job(render_job(job.spec), "spec.yaml") == job


def test_paths_are_relative_to_the_file_and_overrides_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/job.yaml").write_text("model: demo\ndata: {text: ../books}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")

    def text(*overrides: str) -> str | None:
        data = load_job(Path("jobs/job.yaml"), overrides).spec.data
        assert data is not None
        return data.text

    assert text() == f"{tmp_path}/jobs/../books"
    assert text("data.text=other") == f"{tmp_path}/other"
    assert text("data={text: other}") == f"{tmp_path}/other"
    assert text("data.seq_len=64") == f"{tmp_path}/jobs/../books"
    assert text("data.text=~/books") == "/home/someone/books"
    assert text("data.text=/abs") == "/abs"
    assert text("data.text=python-stdlib") == "python-stdlib"


MISTAKES = """\
name: first run
model: dmo
data:
  text: a
  tokens: b
parallel:
  tpp: 2
  tp: 2.0
  cp: 2
  zero: true
train:
  steps: 10
  warmup: 20
  lr: 4:00
  precision: fp16
  betas: [0.9, 1.5]
  gbs: 0
  eval: {evry: 5}
  seed: 12345678901234567890
checkpoint: 5
env: {A: 1, "B-": x}
modules: cuda
retry: {max: 3}
moddel: 3
"""


def test_all_mistakes_of_a_file_are_reported_in_the_order_of_its_lines() -> None:
    found = problems(MISTAKES, "checkpoint.every=3", "train.mbs=no", "nonsense", "name.x=1")
    assert [line.split(": ")[0] for line in found] == [
        "command line checkpoint.every",
        'command line "nonsense"',
        "command line name.x",
        "command line train.mbs",
        "job.yaml:1 name",
        "job.yaml:2 model",
        "job.yaml:3 data",
        "job.yaml:7 parallel.tpp",
        "job.yaml:8 parallel.tp",
        "job.yaml:9 parallel.cp",
        "job.yaml:10 parallel.zero",
        "job.yaml:14 train.lr",
        "job.yaml:15 train.precision",
        "job.yaml:16 train.betas.1",
        "job.yaml:17 train.gbs",
        "job.yaml:18 train.eval.evry",
        "job.yaml:19 train.seed",
        "job.yaml:20 checkpoint",
        "job.yaml:21 env.A",
        "job.yaml:21 env.B-",
        "job.yaml:22 modules",
        "job.yaml:23 retry.max",
        "job.yaml:24 moddel",
    ]
    text = "\n".join(found)
    for part in (
        'command line train.mbs: must be a whole number, not "no" (sequences per microbatch)',
        'name: "first run" is not allowed (name of the run: letters, digits, . _ -)',
        'model: "dmo" is not known; did you mean demo? allowed: demo, tiny, llama3-1b',
        "data: give exactly one of text and tokens, found both",
        "parallel.tpp: unknown key; did you mean tp? allowed: pp, dp_replicate, dp_shard,",
        "parallel.tp: must be a whole number, not 2.0",
        "parallel.cp: 2 is not available in this version of hpcrun; leave it out",
        "parallel.zero: must be a whole number, not true",
        'train.lr: must be a number, not "4:00"',
        'train.precision: "fp16" is not allowed; did you mean fp64? allowed: fp32, bf16, fp64',
        "train.betas.1: must be below 1.0, not 1.5",
        "train.gbs: must be at least 1, not 0",
        "train.eval.evry: unknown key; did you mean every? allowed: every, sequences",
        "checkpoint: must be a mapping of keys to values, not 5",
        "env.A: must be text (put it in quotes), not 1",
        'modules: must be a list, not "cuda" (environment modules to load',
        "retry.max: unknown key; allowed: time_limit, preemption, crash, hang, node, grace",
        "moddel: unknown key; did you mean model? allowed: name, model, data,",
    ):
        assert part in text


def test_one_mistake_is_reported_once() -> None:
    job = "model: demo\ndata: {text: x}\n"
    assert len(problems(with_line(job, "modules: cuda"))) == 1
    assert len(problems(with_line(job, "parallel: {tp: x}", "resources: {ranks_per_node: 8}"))) == 1
    assert len(problems(with_line(job, "train: {lr: .inf}"))) == 1


def test_a_mistake_inside_an_override_is_not_blamed_on_the_file() -> None:
    found = problems("model: demo\ndata:\n  text: x\n  seq_len: 64\n", "data={text: x, seq_len: q}")
    assert found == [
        'command line data.seq_len: must be a whole number, not "q" (tokens per training sequence)'
    ]


def test_a_contradiction_is_reported_beside_simple_mistakes_in_other_sections() -> None:
    text = "model: {preset: demo, kv_heads: 3}\ndata: {text: x}\nparallel: {zero: 3}\ntrain: {lr: x}\n"
    assert [line.split(": ")[0] for line in problems(text)] == [
        "job.yaml:1 model.kv_heads",
        "job.yaml:3 parallel.zero",
        "job.yaml:4 train.lr",
    ]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{preset: [demo]}", "model.preset: a list is not known"),
        ("{preset: demo, layers: x}", 'model.layers: must be a whole number, not "x"'),
        ("{preset: dmo, layers: x}", 'model.layers: must be a whole number, not "x"'),
        ("{preset: demo, hf: x}", "model.hf: cannot be combined with preset; use one of the two"),
        ("{hf: 3}", "model.hf: must be the path of a directory, not 3"),
        ("{hf: ''}", 'model.hf: must be the path of a directory, not ""'),
        ("{hf: /nowhere}", "model.hf: /nowhere/config.json does not exist"),
        ("{layers: 3}", "model.vocab: is missing"),
        ("{preset: demo, heads: 3}", "model.heads: 3 does not divide hidden 128; or give head_dim"),
        ("{preset: demo, heads: 256, kv_heads: 1}", "model.heads: 256 does not divide hidden 128"),
        ("{preset: demo, rope_theta: x}", 'model.rope_theta: must be a number, not "x" (base of the rotary'),
        ("[demo]", "model: must be a mapping of keys to values, not a list"),
        ("3", "model: must be a mapping of keys to values, not 3"),
        ("", "model: is missing; give a preset (demo, tiny, "),
    ],
)
def test_model_mistakes(model: str, message: str) -> None:
    assert message in "\n".join(problems(f"model: {model}\ndata: {{text: x}}\n"))


@pytest.mark.parametrize("line", ["parallel: {cp: 2}", "parallel: {ep: 2}"])
def test_keys_without_work_behind_them_are_refused(line: str) -> None:
    (found,) = problems(with_line("model: demo\ndata: {text: x}", "", line))
    assert "is not available in this version of hpcrun; leave it out" in found


CLUSTER_JOB = """\
model: demo
data: {text: /corpus}
parallel: {tp: 2, dp_shard: 4}
resources:
  nodes: 2
  gpus_per_node: 4
  ranks_per_node: 4
  cpus_per_rank: 8
  time: 1d12h
  mem: 64G
  account: phys:a
  partition: gpu,long
  qos: high
  constraint: "a100&nvlink"
  reservation: r1
  exclude: n[01-03],x7
  exclusive: true
  sbatch: {comment: two words, nice: 100, contiguous: true, gres: null}
modules: [cuda/12.4]
python: /opt/py/bin/python
container:
  {image: "docker://a/b:1", runtime: apptainer, mounts: ["/a:/b", "/c:/c:ro"], workdir: /w, options: [--nv]}
secrets: {WANDB_API_KEY: /home/me/key}
retry: {time_limit: 5, preemption: null, crash: 1, grace: 90s}
cluster: alpha
"""


def test_what_a_job_asks_of_a_cluster_is_taken_as_it_is_written() -> None:
    spec = parse_job(CLUSTER_JOB, "job.yaml").spec
    asked, container = spec.resources, spec.container
    assert container is not None
    assert (asked.time, asked.mem, asked.exclude) == ("1d12h", "64G", "n[01-03],x7")
    assert asked.sbatch == {"comment": "two words", "nice": 100, "contiguous": True, "gres": None}
    assert (spec.ranks, spec.ranks_per_node, container.mounts) == (8, 4, ["/a:/b", "/c:/c:ro"])
    assert (spec.modules, spec.python, spec.cluster) == (["cuda/12.4"], "/opt/py/bin/python", "alpha")
    assert spec.retries is not None
    assert (spec.retries.time_limit, spec.retries.preemption, spec.retries.grace) == (5, None, "90s")
    assert parse_job(render_job(spec), "spec.yaml").spec == spec


def test_a_command_has_a_rank_a_gpu_and_is_queued_again_only_when_it_asks_for_it() -> None:
    def command(text: str) -> JobSpec:
        return parse_job(f"command: [./a, b c]\n{text}\n", "j").spec

    assert command("").ranks == 1
    assert command("resources: {nodes: 3}").ranks == 3
    assert command("resources: {nodes: 2, gpus_per_node: 4}").ranks == 8
    assert command("resources: {nodes: 2, gpus_per_node: 4, ranks_per_node: 3}").ranks == 6
    assert command("parallel: {tp: 4}\nresources: {nodes: 2}").ranks_per_node == 2
    assert command("").retries is None
    assert command("retry: {}").retries == RetrySpec()
    assert parse_job("command: [./a]", "j").plan is None
    assert parse_job(JOB, "j").spec.retries == RetrySpec()


def test_a_command_on_the_command_line_takes_the_place_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("command: [a]\nname: n\n")
    job = load_job(tmp_path / "job.yaml", ["resources.nodes=2"], command=["b", "--c=1"])
    assert (job.spec.command, job.spec.name, job.spec.ranks) == (["b", "--c=1"], "n", 2)
    assert load_job(None, command=["b"]).spec.command == ["b"]
    with pytest.raises(SpecError, match=r"^command line command: its first word is the program"):
        load_job(None, command=[""])


def test_paths_of_secrets_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("command: [a]\nsecrets: {A: keys/a, B: /b}\n")
    spec = load_job(tmp_path / "job.yaml", ["secrets.C=c"]).spec
    assert spec.secrets == {"A": f"{tmp_path}/keys/a", "B": "/b", "C": f"{Path.cwd()}/c"}


def test_keys_without_work_behind_them_may_stand_at_their_defaults() -> None:
    text = "parallel: {cp: 1}\nresources: {nodes: 1, spares: 0, sbatch: {}}\nmodules: []\nretry:\n"
    parse_job(f"model: demo\ndata: {{text: x}}\n{text}", "j")


def test_an_empty_section_stands_for_its_defaults() -> None:
    job = parse_job("name:\nmodel: demo\ndata: {text: x}\ntrain:\nparallel:\n", "j")
    assert job.spec.train.steps == 100


def test_a_resolved_job_reads_back_equal_whatever_text_it_holds() -> None:
    text = JOB.replace("text: python-stdlib", 'text: "/data/é 漢 # x: \\u2028 no"').replace("3e-4", "1e-05")
    words = ["no", "012", "4:00", "3e-4", "null", "~", "", " x ", "a: b", "a\nb", "1.0", "漢", "'\"", "#"]
    lines = [f"  V{i}: {json.dumps(word, ensure_ascii=False)}" for i, word in enumerate(words)]
    job = parse_job(with_line(text, *lines), "job.yaml")
    assert [job.spec.env[f"V{i}"] for i in range(len(words))] == words
    assert job.spec.train.lr == 1e-05
    again = parse_job(render_job(job.spec), "spec.yaml")
    assert again == job
    assert render_job(again.spec) == render_job(job.spec)


@pytest.mark.parametrize(
    ("name", "ranks"), [("demo", 8), ("llama3-8b", 8), ("my-training", 16), ("sweep", 1)]
)
def test_every_shipped_job_loads(name: str, ranks: int) -> None:
    files = {load_job(path).spec.name: path for path in shipped_file("jobs/demo.yaml").parent.iterdir()}
    assert files.keys() == {"demo", "llama3-8b", "my-training", "sweep"}
    job = load_job(files[name])
    assert job.spec.ranks == ranks
    assert len(job.elements) == (12 if name == "sweep" else 0)


def test_what_a_shipped_job_has_in_comments_loads_too(tmp_path: Path) -> None:
    (tmp_path / "command.yaml").write_text(
        "\n".join(
            line.replace("# ", "", 1) if re.match(r" *# +[a-z_A-Z]+:|# (secrets|retry):", line) else line
            for line in shipped_file("jobs/command.yaml").read_text().splitlines()
        )
    )
    spec = load_job(tmp_path / "command.yaml").spec
    assert (spec.resources.partition, spec.resources.sbatch) == ("gpu", {"comment": "first try"})
    assert (list(spec.secrets), spec.retry and spec.retry.crash) == (["WANDB_API_KEY"], 1)


def test_what_is_not_shipped_is_refused_with_the_list() -> None:
    with pytest.raises(
        UsageError,
        match=r"jobs/dmo\.yaml does not come .* jobs/command\.yaml, jobs/demo\.yaml, jobs/llama3-8b",
    ):
        shipped_file("jobs/dmo.yaml")


def test_flatten_names_leaves_by_dotted_keys() -> None:
    assert flatten_keys({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_the_schema_accepts_presets_names_and_sizes_beside_them() -> None:
    schema = job_schema()
    json.dumps(schema)
    name, section, _ = schema["properties"]["model"]["anyOf"]
    assert "demo" in name["enum"]
    definition = schema["$defs"][section["$ref"].rpartition("/")[2]]
    assert {"preset", "hf", "layers"} <= definition["properties"].keys()
    assert "required" not in definition
    assert "required" not in schema
    assert definition["additionalProperties"] is False
    described = [key for key, value in schema["properties"].items() if "description" in value]
    assert described == list(schema["properties"])


WORDS = r"""
!!binary ~ 1e-400
-1 0 1 2 3 1e400 .nan .inf true no x 'x' "\0" "\uD800" "\x9b" "\u2028" é [] [1] [[[]]] {} {a} {preset:demo}
*a &a !!int !!python/name:os.system demo python-stdlib hf - ? | > % @ ` " ' { [ 1:2 012 0x10 2024-01-01
"""
NASTY = (
    *WORDS.split(),
    "",
    "- 1",
    "{a: 1}",
    "{preset: demo}",
    "9" * 400,
    "9" * 5000,
    "\t",
    "\x07",
    "\x85",
    "\u2028",
)


def mutate(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    match rng.randrange(7):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 2:
            lines[at] = lines[at].partition(":")[0] + ": " + rng.choice(NASTY)
        case 3:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(NASTY)[:20] + lines[at][place:]
        case 4:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + lines[at][place + 1 :]
        case 5:
            lines[at] = rng.choice(("  ", "    ", "")) + lines[at].lstrip()
        case _:
            key = rng.choice(list(flatten_keys(parse_job(JOB, "j").spec.model_dump()))).split(".")
            lines += [f"{'  ' * depth}{part}:" for depth, part in enumerate(key)]
            lines[-1] += f" {rng.choice(NASTY)}"
    return "\n".join(lines) + "\n"


def check_one(text: str, overrides: list[str]) -> bool:
    try:
        job = parse_job(text, "job.yaml", overrides)
    except SpecError as error:
        refused = error
    else:
        assert parse_job(job.render(), "spec.yaml") == job
        return True
    lines = str(refused).encode().decode().split("\n")
    assert len(lines) == len(refused.problems)
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith(("job.yaml", "command line")) for line in lines)
    return False


def test_no_input_gives_anything_but_a_job_or_problems_a_line_each() -> None:
    rng = random.Random(7)
    keys = list(flatten_keys(parse_job(JOB, "j").spec.model_dump()))
    accepted = 0
    for _ in range(400):
        text = JOB
        for _ in range(rng.randrange(1, 3)):
            text = mutate(rng, text)
        overrides = [f"{rng.choice(keys)}={rng.choice(NASTY)}"] if rng.random() < 0.5 else []
        accepted += check_one(text, overrides)
    assert 20 < accepted < 380  # both outcomes are exercised


def test_every_key_takes_nasty_values_without_a_traceback() -> None:
    plain = parse_job("model: tiny\ndata: {text: x}", "j").spec.model_dump()
    keys = [
        *flatten_keys(plain),
        "model",
        "data",
        "train",
        "model.hf",
        "model.preset",
        "train.profile.start",
        "sweep.grid.train.lr",
        "sweep.list",
        "container.image",
        "resources.sbatch.comment",
        "secrets.A",
        "env.A",
        "x",
        "x.y",
    ]
    rng = random.Random(8)
    for key in keys:
        for value in rng.sample(NASTY, 12):
            check_one("model: tiny\ndata: {text: x}", [f"{key}={value}"])


@pytest.mark.parametrize(
    "override", ["", "=", "a", "a=", ".=1", "a..b=1", "train.=1", "\udcff=1", "train.lr=\udcff"]
)
def test_bad_overrides_are_refused(override: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_job("model: demo\ndata: {text: x}", "j", [override])
    assert str(caught.value).startswith("command line")


def test_a_mistake_inside_a_list_is_told_with_what_the_list_is() -> None:
    text = "model: demo\ndata: {text: python-stdlib}\ntrain: {betas: [0.9, 1.5]}\nmodl: 1\n"
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml")
    assert any(
        "train.betas.1: must be below 1.0, not 1.5 (AdamW betas)" in str(p) for p in caught.value.problems
    )


def test_the_short_forms_of_a_model_are_offered_too() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job("model: {prset: demo}\ndata: {text: python-stdlib}\n", "job.yaml")
    (line,) = [str(problem) for problem in caught.value.problems if "prset" in problem.key]
    assert "did you mean preset?" in line
    assert "hf" in line.partition("allowed")[2]
