"""States from elsewhere: nothing that their job, their lists of tensors or names say is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout

from hpcrun.errors import HpcrunError
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import flatten_keys, load_job
from hpcrun.specs.portable import PORTABLE_KEYS, portable_part
from hpcrun.specs.resolve import default_job_values
from hpcrun.specs.run_lookup import find_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import SavedCheckpoint, parse_commit_record, render_commit_record
from hpcrun.specs.yaml import render_yaml
from tests.runtime.test_exchange import dcp_of, job, refused, run, saved_run, told

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
__all__ = ["job", "saved_run"]

HOSTILE: dict[str, Any] = {
    "env": {"LD_PRELOAD": "/tmp/theirs.so", "NOTE": "private value"},
    "hooks": [{"command": ["touch", "/tmp/hooked"]}],
    "python": "/tmp/theirs/python",
    "modules": ["theirs"],
    "container": {"image": "/tmp/theirs.sif", "runtime": "apptainer", "options": ["--bind=/"]},
    "secrets": {"TOKEN": "/home/me/.ssh/id_rsa"},
    "telemetry": {
        "textfile": "/tmp/t",
        "targets": "/tmp/t",
        "tensorboard": "/tmp/t",
        "wandb": {"entity": "he"},
    },
    "preflight": False,
    "cluster": "theirs",
    "retry": {"crash": 100},
    "watch": {"hangs": False},
    "elastic": {"min_replicas": 1},
}
HOSTILE_PARTS: dict[str, dict[str, Any]] = {
    "train": {"profile": {"start": 1}},
    "resources": {"account": "theirs", "sbatch": {"comment": "x"}, "mem": "1T", "exclude": "n1"},
    "checkpoint": {
        "local": "/tmp/theirs",
        "memory": 1,
        "object": {"url": "s3://theirs/x", "endpoint": "http://attacker.example"},
        "durable": {"pool": "theirs"},
    },
}


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds."""
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)


def test_every_key_of_a_job_is_classified() -> None:
    assert PORTABLE_KEYS.keys() == JobSpec.model_fields.keys()
    for key, rule in PORTABLE_KEYS.items():
        section = _section(JobSpec.model_fields[key].annotation)
        if isinstance(rule, dict):
            assert section is not None
            assert rule.keys() - {"preset", "hf"} == section.model_fields.keys(), key
    # What goes as a whole must stay what was looked at here.
    whole = {key for key, rule in PORTABLE_KEYS.items() if rule is True}
    assert whole == {"name", "data", "parallel", "device"}
    of_data = {"text", "tokens", "pattern", "seq_len", "holdout", "dtype", "shuffle"}
    assert set(_section(JobSpec.model_fields["data"].annotation).model_fields) == of_data  # type: ignore[union-attr]


def hostile_spec(job: Path) -> dict[str, Any]:
    values = load_job(job).spec.model_dump(mode="json") | HOSTILE
    for section, more in HOSTILE_PARTS.items():
        values[section] = values[section] | more
    return values


@pytest.mark.parametrize("form", ["dcp", "hpcrun"])
def test_the_job_beside_a_state_brings_nothing_but_the_state(
    saved_run: RunDir, job: Path, tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    told("export", saved_run.id, "--format", form, "--out", out)
    (out / "spec.yaml").write_text(render_yaml(hostile_spec(job)))
    found = told("import", out, "--name", "taken")
    expected = [*HOSTILE, "train.profile"]
    assert set(expected) <= set(found["left_out"])
    own, plain = load_job(job).spec, default_job_values()
    spec = load_job(find_run("taken").spec).spec
    assert spec.model_copy(update={"name": own.name}) == own
    kept = flatten_keys(spec.model_dump(mode="json"))
    for key in HOSTILE:
        assert {one: v for one, v in kept.items() if one.split(".")[0] == key} == flatten_keys(
            {key: plain[key]}
        )
    text = find_run("taken").spec.read_text()
    assert not [word for word in ("/tmp/t", "theirs", "attacker", "private value") if word in text]
    (line,) = [one for one in run("import", out, "--name", "b").stdout.splitlines() if "left out" in one]
    assert "env" in line
    assert "checkpoint.object" in line


def test_a_job_of_ones_own_is_taken_whole(saved_run: RunDir, job: Path, tmp_path: Path) -> None:
    told("export", saved_run.id, "--format", "dcp", "--out", tmp_path / "out")
    job.write_text(job.read_text() + "env: {MINE: kept}\n")
    assert told("import", tmp_path / "out", "--name", "own", "--job", job)["left_out"] == []
    assert load_job(find_run("own").spec).spec.env == {"MINE": "kept"}


def test_an_export_holds_nothing_of_the_environment(saved_run: RunDir, job: Path, tmp_path: Path) -> None:
    values = hostile_spec(job) | {"elastic": None}
    saved_run.spec.write_text(render_yaml(values))
    for form in ("dcp", "hpcrun", "hf"):
        found = told("export", saved_run.id, "--format", form, "--out", tmp_path / form)
        if form != "hf":
            assert "secrets" in found["left_out"]
            assert load_job(tmp_path / form / "spec.yaml").spec == load_job(job).spec
        texts = b"".join(one.read_bytes() for one in (tmp_path / form).iterdir())
        for word in (b"private value", b"id_rsa", b"theirs", b"attacker"):
            assert word not in texts, form


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: values.update(command=["touch", "/tmp/x"], model=None, data=None), "with --job"),
        (lambda values: values.update(model={"hf": "/dev/zero"}), "model.vocab"),
        (lambda values: values["model"].update(layers=10**15), "model.layers"),
        (lambda values: values.update(data=None), "data: is missing"),
    ],
)
def test_a_job_that_leads_elsewhere_is_refused_in_one_line(
    saved_run: RunDir, job: Path, tmp_path: Path, change: Any, said: str
) -> None:
    told("export", saved_run.id, "--format", "hpcrun", "--out", tmp_path / "out")
    values = load_job(job).spec.model_dump(mode="json")
    change(values)
    (tmp_path / "out" / "spec.yaml").write_text(render_yaml(values))
    result = run("import", tmp_path / "out", "--name", "new")
    assert isinstance(result.exception, HpcrunError)
    assert said in str(result.exception)


def test_unknown_keys_are_left_out_and_told() -> None:
    kept, dropped = portable_part({"model": "demo", "prologue": "x", "train": {"lr": 0.1, "script": "x"}})
    assert kept == {"model": "demo", "train": {"lr": 0.1}}
    assert dropped == ["prologue", "train.script"]


def test_a_source_never_leads_out_of_itself_nor_holds_up(
    saved_run: RunDir, job: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    for form in ("dcp", "hpcrun", "hf"):
        told("export", saved_run.id, "--format", form, "--out", tmp_path / form)
        for name in [one.name for one in (tmp_path / form).iterdir()]:
            copy = tmp_path / "copy"
            for kind in ("link", "pipe", "directory-link"):
                shutil.copytree(tmp_path / form, copy)
                (copy / name).unlink()
                if kind == "link":
                    (copy / name).symlink_to(outside)
                elif kind == "pipe":
                    os.mkfifo(copy / name)
                else:
                    (copy / name).symlink_to("/proc/self")
                text = refused("import", copy, "--name", "new", "--job", job)
                assert name in text
                assert "leads out of" in text or "is not a regular file" in text
                shutil.rmtree(copy)


def test_links_of_hugging_face_s_cache_are_followed(saved_run: RunDir, job: Path, tmp_path: Path) -> None:
    told("export", saved_run.id, "--out", tmp_path / "hf")
    cache = tmp_path / "models--a"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "hf").iterdir():
        path.rename(cache / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert told("import", snapshot, "--name", "cached", "--job", job)["format"] == "hf"


def test_names_in_lists_never_climb(saved_run: RunDir, job: Path, tmp_path: Path) -> None:
    told("export", saved_run.id, "--out", tmp_path / "hf", "--shard-size", "5kB")
    (tmp_path / "hf" / "SHA256SUMS").unlink()
    index = tmp_path / "hf" / "model.safetensors.index.json"
    for name in ("../x", "/etc/passwd", "a/../../x", "sub/x", "."):
        told_of = json.loads(index.read_text())
        told_of["weight_map"] = dict.fromkeys(told_of["weight_map"], name)
        index.write_text(json.dumps(told_of))
        assert "outside its directory" in refused("import", tmp_path / "hf", "--name", "x", "--job", job)
    source = dcp_of(job, tmp_path / "dcp")
    found: Metadata = pickle.loads((source / ".metadata").read_bytes())
    assert found.storage_data is not None
    for name in ("../x", "/etc/passwd", "sub/x", ".."):
        for info in found.storage_data.values():
            info.relative_path = name
        (source / ".metadata").write_bytes(pickle.dumps(found))
        assert "outside its directory" in refused("import", source, "--name", "x", "--job", job, "--step", 1)


def test_a_record_of_other_kinds_proves_nothing(saved_run: RunDir, job: Path, tmp_path: Path) -> None:
    good = SavedCheckpoint(tmp_path, 4, 16, 1, 1, "0" * 32, "s", "r", "", "durable", 1.0, 10, "h", (1,))
    wrong: list[dict[str, Any]] = [
        {"step": "../../x"}, {"step": -1}, {"step": True}, {"step": 1 << 70}, {"world_size": 0},
        {"generation": "../../../home"}, {"generation": 5}, {"file_bytes": (-1,)}, {"file_bytes": ("x",)},
        {"manifest_bytes": -5}, {"manifest_hash": None}, {"tier": ["x"]}, {"written": "soon"},
    ]  # fmt: skip
    assert isinstance(parse_commit_record(tmp_path, render_commit_record(good)), SavedCheckpoint)
    for change in wrong:
        text = render_commit_record(SavedCheckpoint(**(vars(good) | change)))
        assert not isinstance(parse_commit_record(tmp_path, text), SavedCheckpoint), change
    told("export", saved_run.id, "--format", "dcp", "--out", tmp_path / "dcp")
    for note in ({"world_size": 10**9}, {"step": True}, {"position": -1}, {"step": "1"}):
        path = tmp_path / "dcp" / "hpcrun.json"
        whole = {"step": 1, "position": 4, "world_size": 1} | note
        path.write_text(json.dumps(whole))
        assert "makes no sense" in refused("import", tmp_path / "dcp", "--name", "x")


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _sets(owner: str, name: str) -> bytes:
    """A pickle that sets an attribute of something global."""
    module, _, what = owner.rpartition(".")
    return b"c" + module.encode() + b"\n" + what.encode() + b"\n(N(dV" + name.encode() + b"\nI1\nstb."


def test_no_pickle_runs_or_changes_anything(job: Path, tmp_path: Path) -> None:
    source, mark = dcp_of(job, tmp_path / "dcp"), tmp_path / "mark"
    torch_s = "torch.distributed.checkpoint"
    crafted = [
        pickle.dumps(_Calls(os.mkdir, str(mark))),
        pickle.dumps(_Calls(os.system, f"touch {mark}")),
        pickle.dumps(_Calls(eval, f"open({str(mark)!r}, 'w')")),
        pickle.dumps(_Calls(exec, f"open({str(mark)!r}, 'w')")),
        pickle.dumps(_Calls(getattr, torch.Size, "__subclasses__")),
        pickle.dumps(_Calls(torch.load, str(mark))),
        pickle.dumps({"a": _Calls(os.mkdir, str(mark))}),
        b"cbuiltins\n__import__\n(Vos\ntR.",
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__class__\x93.",
        b"\x80\x04\x8c\x07pathlib\x8c\x06Path.cwd\x93.",
        b"ctorch\nhub\n.",
        b"ctorch\nload\n.",
        b"ctorch.hub\nload\n.",
        b"csubprocess\nPopen\n.",
        b"\x80\x02Va\nQ.",
        _sets(f"{torch_s}.metadata.TensorStorageMetadata", "size"),
        _sets(f"{torch_s}.metadata.Metadata", "__eq__"),
        _sets(f"{torch_s}.metadata.MetadataIndex", "planted"),
        _sets("torch.serialization._get_layout", "planted"),
        pickle.dumps(OrderedDict(a=1)),
        b"(" * 100_000 + b"t" * 100_000 + b".",
        b"",
        b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        pickle.dumps(Metadata({"a": "x"}, storage_data={})),  # type: ignore[dict-item]
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): "x"})),
    ]
    before = dict(vars(TensorStorageMetadata)), dict(vars(Metadata)), dict(vars(_get_layout))
    for data in crafted:
        (source / ".metadata").write_bytes(data)
        refused("import", source, "--name", "new", "--job", job, "--step", 1)
        assert not mark.exists()
    assert before == (dict(vars(TensorStorageMetadata)), dict(vars(Metadata)), dict(vars(_get_layout)))
    assert not hasattr(MetadataIndex, "planted")


def test_tensors_that_no_file_holds_are_refused(job: Path, tmp_path: Path) -> None:
    source = dcp_of(job, tmp_path / "dcp")
    found: Metadata = pickle.loads((source / ".metadata").read_bytes())
    for entry in found.state_dict_metadata.values():
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = torch.Size([1 << 40])
    (source / ".metadata").write_bytes(pickle.dumps(found))
    said = refused("import", source, "--name", "new", "--job", job, "--step", 1)
    assert "take more than its files hold" in said
