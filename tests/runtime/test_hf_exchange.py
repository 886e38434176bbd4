"""Hugging Face directories into a run and out again: hashes, types of tensors, files beside them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcrun.errors import SpecError, UsageError
from hpcrun.runtime.control import LoneControl
from hpcrun.runtime.initial_weights import adopt_initial_weights
from hpcrun.runtime.model import parameter_shapes
from hpcrun.specs.base_model import read_base_model
from hpcrun.specs.load import load_job
from hpcrun.specs.model import ModelSpec, make_hf_config
from hpcrun.specs.run_lookup import create_run, find_run
from hpcrun.specs.saves import resumable_checkpoints
from hpcrun.submission.prepare import check_job_inputs
from tests.runtime.test_exchange import job, read_all, refused, told

__all__ = ["job"]

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BESIDE = {
    "generation_config.json": '{"eos_token_id": 2, "temperature": 0.6}',
    "tokenizer.json": '{"model": {"vocab": {"a": 0}}}',
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "tokenizer.model": "\x00binary",
    "chat_template.jinja": "{{ messages }}",
    "LICENSE": "as it is",
    "README.md": "# a model",
}
CONFIG = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "use_cache": True,
    "attention_dropout": 0.0,
    "made_up": {"kept": ["as", "it", "is"]},
}


def spec_of(job: Path) -> ModelSpec:
    spec = load_job(job).spec.model
    assert spec is not None
    return spec


def weights_of(job: Path, dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    found = {}
    for name, shape in parameter_shapes(spec_of(job)).items():
        stored = name if name == "lm_head.weight" else f"model.{name}"
        found[stored] = (torch.randn(shape, generator=random) * 0.1).to(dtype_of(name))
    return found


def make(
    directory: Path,
    job: Path,
    dtype_of: Callable[[str], torch.dtype] = lambda _name: F32,
    *,
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """A directory as somebody else's save_pretrained leaves it."""
    tensors = weights_of(job, dtype_of)
    directory.mkdir()
    for name, text in BESIDE.items():
        (directory / name).write_text(text)
    (directory / "config.json").write_text(json.dumps(make_hf_config(spec_of(job)) | CONFIG | (config or {})))
    if shards == 1:
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
        return tensors
    places: dict[str, str] = {}
    for number in range(shards):
        shard = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, directory / shard, metadata={"format": "pt"})
        places |= dict.fromkeys(part, shard)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
    return tensors


def load_all(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def sums(directory: Path) -> Path:
    """SHA256SUMS by the stock tool."""
    done = subprocess.run("sha256sum * > .sums", shell=True, cwd=directory, check=True)
    assert done.returncode == 0
    (directory / ".sums").rename(directory / "SHA256SUMS")
    return directory / "SHA256SUMS"


KINDS: dict[str, tuple[Callable[[str], torch.dtype], str]] = {
    "f32": (lambda _name: F32, "float32"),
    "bf16": (lambda _name: BF16, "bfloat16"),
    "f16": (lambda _name: F16, "float16"),
    "mixed": (lambda name: F32 if "norm" in name else F16 if "mlp" in name else BF16, "bfloat16"),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_gives_the_same_bytes_config_and_files(
    job: Path, tmp_path: Path, runs_root: Path, kind: str, shards: int
) -> None:
    dtype_of, stated = KINDS[kind]
    tensors = make(tmp_path / "in", job, dtype_of, shards=shards, config={"torch_dtype": stated})
    found = told("import", tmp_path / "in", "--name", "a", "--job", job)
    assert found["hashes_checked"] is False
    assert sorted(found["carried"]["files"]) == sorted(BESIDE)
    assert found["carried"]["absent"] == []
    assert all(cast["rounded"] == 0 for cast in found["casts"])
    narrow = {str(tensor.dtype)[6:] for tensor in tensors.values()} - {"float32"}
    assert {cast["source"] for cast in found["casts"]} == narrow
    size = [] if shards == 1 else ["--shard-size", "4KB"]
    out = told("export", "a", "--out", tmp_path / "out", "--dtype", "source", *size)
    again = load_all(tmp_path / "out")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert raw(again[name]) == raw(tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((tmp_path / "in" / "config.json").read_text())
    for name, text in BESIDE.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert out["base_model"] == str(tmp_path / "in")
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
    listed = {line.split("  ")[1] for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in (tmp_path / "out").iterdir()} - {"SHA256SUMS"}
    assert told("import", tmp_path / "out", "--name", "b", "--job", job)["hashes_checked"] is True
    first, second = (read_all(resumable_checkpoints(find_run(name).checkpoints)[0]) for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


def damage_flip(directory: Path) -> None:
    data = bytearray((directory / SINGLE).read_bytes())
    data[-3] ^= 1
    (directory / SINGLE).write_bytes(data)


def in_place_of(path: Path, make_other: Callable[[Path], object]) -> None:
    path.unlink()
    make_other(path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (damage_flip, "it has other bytes in model.safetensors;"),
    "tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "other bytes in tokenizer.json;"),
    "missing": (lambda d: (d / "LICENSE").unlink(), "it lacks LICENSE;"),
    "extra": (lambda d: (d / "added_tokens.json").write_text("{}"), "it holds added_tokens.json besides;"),
    "extra link": (lambda d: (d / "vocab.json").symlink_to("config.json"), "it holds vocab.json besides;"),
    "both": (lambda d: (d / "README.md").rename(d / "README"), "lacks README.md and holds README besides;"),
    "no sums": (lambda d: (d / "SHA256SUMS").write_text("hello\n"), "SHA256SUMS:1: is not a hash and"),
    "climbs": (
        lambda d: (d / "SHA256SUMS").write_text("0" * 64 + "  ../job.yaml\n"),
        "names '../job.yaml', outside its directory",
    ),
    "twice": (
        lambda d: (d / "SHA256SUMS").write_text(f"{'0' * 64}  LICENSE\n{'1' * 64} *./LICENSE\n"),
        "gives LICENSE a second hash",
    ),
    "binary": (lambda d: (d / "SHA256SUMS").write_bytes(b"\xff\xfe"), "SHA256SUMS: cannot be read"),
    "a pipe": (lambda d: in_place_of(d / "LICENSE", os.mkfifo), "is not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_not_what_their_hashes_say_are_not_imported(
    job: Path, tmp_path: Path, runs_root: Path, damage: str
) -> None:
    make(tmp_path / "in", job)
    sums(tmp_path / "in")
    change, said = DAMAGES[damage]
    change(tmp_path / "in")
    assert said in refused("import", tmp_path / "in", "--name", "a", "--job", job)
    assert not list(runs_root.glob("*")), "nothing was imported"


def test_signatures_hidden_files_and_folders_are_not_held_against_hashes(
    job: Path, tmp_path: Path, runs_root: Path
) -> None:
    make(tmp_path / "in", job)
    text = sums(tmp_path / "in").read_text()
    (tmp_path / "in" / "SHA256SUMS").write_text("# ours\n" + text.replace("  ", " *./").upper().lower())
    for name in ("SHA256SUMS.asc", ".gitattributes"):
        (tmp_path / "in" / name).touch()
    (tmp_path / "in" / ".cache").mkdir()
    lower = tmp_path / "in" / "SHA256SUMS"
    lower.write_text(text.replace("  ", " *./"))
    assert told("import", tmp_path / "in", "--name", "a", "--job", job)["hashes_checked"] is True


def test_what_a_type_cannot_hold_is_asked_for_or_refused(job: Path, tmp_path: Path, runs_root: Path) -> None:
    make(tmp_path / "wide", job, lambda name: F64 if name == "norm.weight" else F32)
    words = ("import", tmp_path / "wide", "--name", "wide", "--job", job)
    assert told(*words)["casts"][0]["rounded"] == 0, "what float32 holds exactly is no loss"
    tensors = load_file(tmp_path / "wide" / SINGLE)
    tensors["model.norm.weight"] = torch.full((16,), 1 / 3, dtype=F64)
    save_file(tensors, tmp_path / "wide" / SINGLE)
    lossy = ("import", tmp_path / "wide", "--name", "lossy", "--job", job)
    said = "norm.weight: 16 of 16 values in float64 would be rounded in float32; give --dtype float32"
    assert said in refused(*lossy)
    assert "keeps weights in float32 (train.precision)" in refused(*lossy, "--dtype", "bfloat16")
    (cast,) = told(*lossy, "--dtype", "float32")["casts"]
    assert (cast["rounded"], cast["first"], cast["tensors"]) == (16, "norm.weight", 1)
    tensors["model.norm.weight"][3] = 1e300
    save_file(tensors, tmp_path / "wide" / SINGLE)
    said = "--dtype float32: norm.weight holds 1e+300, too large for it; use float64"
    assert said in refused("import", tmp_path / "wide", "--name", "huge", "--job", job, "--dtype", "float32")


def test_an_export_says_what_its_type_has_changed(job: Path, tmp_path: Path, runs_root: Path) -> None:
    tensors = make(tmp_path / "in", job)
    tensors["model.norm.weight"][:] = torch.tensor([1.0, 1e-30, 1 / 3, float("nan")] * 4)
    save_file(tensors, tmp_path / "in" / SINGLE)
    told("import", tmp_path / "in", "--name", "a", "--job", job)
    plain = told("export", "a", "--out", tmp_path / "plain")
    assert plain["casts"] == []
    assert raw(load_all(tmp_path / "plain")["model.norm.weight"]) == raw(tensors["model.norm.weight"])
    (half,) = told("export", "a", "--out", tmp_path / "half", "--dtype", "float16")["casts"]
    assert (half["source"], half["target"]) == ("float32", "float16")
    assert half["zeroed"] >= 4
    expected = sum(
        int(((tensor.to(F16).to(F32) != tensor) & ~tensor.isnan()).sum()) for tensor in tensors.values()
    )
    assert half["rounded"] == expected
    assert half["values"] == sum(tensor.numel() for tensor in tensors.values())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    assert "--dtype int8: not known; use float32, bfloat16, float16, float64 or source" in refused(
        "export", "a", "--out", tmp_path / "int", "--dtype", "int8"
    )


def rename_tensor(directory: Path) -> None:
    tensors = load_file(directory / SINGLE)
    save_file({**tensors, "norm.weight": tensors["model.norm.weight"] + 1}, directory / SINGLE)


def second_shard(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model-00002-of-00003.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def with_header(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = (directory / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (directory / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


CONTRADICTIONS: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "two of a name": (1, rename_tensor, "has both model.norm.weight and norm.weight"),
    "two layouts": (3, lambda d: shutil.copy(d / "model-00001-of-00003.safetensors", d / SINGLE), "has both"),
    "more than the index": (
        3,
        lambda d: second_shard(d, lambda tensors: tensors.update(extra=torch.ones(()))),
        "model-00002-of-00003.safetensors: also holds extra, against",
    ),
    "less than the index": (
        3,
        lambda d: second_shard(d, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight", None)
                               or tensors.pop(next(iter(tensors)))),
        "model-00002-of-00003.safetensors: has no ",
    ),
    "a scalar": (
        1,
        lambda d: with_header(d, lambda h: h.update(s={"dtype": "F32", "shape": [], "data_offsets": [0, 4]})),
        "has unexpected s;",
    ),
    "an empty one": (
        1,
        lambda d: with_header(
            d, lambda h: h.update(e={"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]})
        ),
        "has unexpected e;",
    ),
    "an int": (
        1,
        lambda d: with_header(d, lambda h: h["model.norm.weight"].update(dtype="I32")),
        "the weights are quantised (model.norm.weight is stored as I32)",
    ),
    "a lying length": (
        1,
        lambda d: with_header(d, lambda h: h["model.norm.weight"].update(shape=[17])),
        "not the header of a safetensors file",
    ),
    "padded vocabulary": (
        1,
        lambda d: save_file(
            load_file(d / SINGLE) | {"model.embed_tokens.weight": torch.ones(320, 16)}, d / SINGLE
        ),
        "embed_tokens.weight [320, 16] instead of [256, 16]; the vocabulary is padded: use vocab: 320",
    ),
    "a pickle": (
        1,
        lambda d: (d / SINGLE).rename(d / "pytorch_model.bin"),
        "pytorch_model.bin may run code when loaded, so convert",
    ),
    "a link out": (
        1,
        lambda d: in_place_of(d / "LICENSE", lambda path: path.symlink_to("/etc/hostname")),
        "LICENSE: is a link that leads out of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_directory_whose_files_do_not_agree_is_refused_in_one_line(
    job: Path, tmp_path: Path, runs_root: Path, name: str
) -> None:
    shards, change, said = CONTRADICTIONS[name]
    make(tmp_path / "in", job, shards=shards)
    change(tmp_path / "in")
    assert said in refused("import", tmp_path / "in", "--name", "a", "--job", job)
    assert not list(runs_root.glob("*"))


def test_a_tied_model_with_another_head_is_refused_and_with_the_same_is_taken(
    job: Path, tmp_path: Path, runs_root: Path
) -> None:
    make(tmp_path / "in", job, config={"tie_word_embeddings": True})
    job.write_text(job.read_text().replace("context: 32}", "context: 32, tied: true}"))
    words = ("import", tmp_path / "in", "--name", "a", "--job", job)
    assert "lm_head.weight is not embed_tokens.weight, although the model ties the two" in refused(*words)
    tensors = load_file(tmp_path / "in" / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "in" / SINGLE)
    told(*words)


def test_what_config_tensors_and_job_disagree_about_is_named_and_the_run_counts(
    job: Path, tmp_path: Path, runs_root: Path
) -> None:
    make(
        tmp_path / "in",
        job,
        lambda _name: BF16,
        shards=3,
        config={"torch_dtype": "float16", "rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    )
    (tmp_path / "in" / "model-00004-of-00004.safetensors").touch()
    (tmp_path / "in" / "modeling_x.py").write_text("evil = 1")
    found = told("import", tmp_path / "in", "--name", "a", "--job", job)
    notes = "\n".join(found["notes"])
    assert "config.json says float16, the tensors are 21 bfloat16" in notes
    assert "config.json says rope_theta 500000.0 instead of 10000.0; the job's counts" in notes
    assert "model-00004-of-00004.safetensors: not named by" in notes
    assert found["carried"]["left"] == ["modeling_x.py"]
    out = told("export", "a", "--out", tmp_path / "out", "--dtype", "bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_parameters"]["rope_theta"]) == (1e4, 1e4)
    assert (config["torch_dtype"], config["model_type"]) == ("bfloat16", "mistral")
    assert config["eos_token_id"] == CONFIG["eos_token_id"]
    assert config["made_up"] == CONFIG["made_up"]
    assert "rope_theta 500000.0 instead of 10000.0; the run's counts" in out["notes"][0]
    assert not (tmp_path / "out" / "modeling_x.py").exists()
    twice = {"rope_scaling": {"rope_type": "default", "rope_theta": 1.0}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | twice))
    said = "\n".join(told("import", tmp_path / "in", "--name", "b", "--job", job)["notes"])
    assert "rope_theta is 10000.0 and also 1.0; keep the one" in said


def test_the_base_model_goes_along_through_every_form_and_damage_to_it_is_named(
    job: Path, tmp_path: Path, runs_root: Path
) -> None:
    make(tmp_path / "in", job, lambda _name: BF16)
    told("import", tmp_path / "in", "--name", "first", "--job", job)
    shutil.rmtree(tmp_path / "in")
    before = "first"
    for form in ("hpcrun", "dcp"):
        told("export", before, "--format", form, "--out", tmp_path / form)
        told("import", tmp_path / form, "--name", form, "--job", job)
        before = form
    found = told("export", before, "--out", tmp_path / "out", "--dtype", "source")
    assert sorted(found["carried"]["files"]) == sorted(BESIDE)
    assert found["base_model"] == str(tmp_path / "in")
    assert all(tensor.dtype == BF16 for tensor in load_all(tmp_path / "out").values())
    (find_run(before).path / "base_model" / "tokenizer.json").write_text("{}")
    assert "has other bytes in tokenizer.json" in refused("export", before, "--out", tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_a_directory_without_tokenizer_says_so_and_one_of_the_cache_is_read(
    job: Path, tmp_path: Path, runs_root: Path
) -> None:
    """Hugging Face's cache is links into its blobs."""
    make(tmp_path / "in", job)
    home = tmp_path / "models--a" / "snapshots" / "1"
    home.mkdir(parents=True)
    (tmp_path / "models--a" / "blobs").mkdir()
    for name in (SINGLE, "config.json", "generation_config.json"):
        blob = hashlib.sha256(name.encode()).hexdigest()
        (tmp_path / "in" / name).rename(tmp_path / "models--a" / "blobs" / blob)
        (home / name).symlink_to(f"../../blobs/{blob}")
    found = told("import", home, "--name", "a", "--job", job)
    assert found["carried"]["files"] == ["generation_config.json"]
    assert found["carried"]["absent"] == ["tokenizer", "license"]
    out = told("export", "a", "--out", tmp_path / "out")
    assert out["carried"]["absent"] == ["tokenizer", "license"]
    assert not (tmp_path / "out" / "generation_config.json").is_symlink()


def test_training_that_begins_with_weights_checks_them_and_keeps_what_is_beside_them(
    job: Path, tmp_path: Path, runs_root: Path
) -> None:
    tensors = make(tmp_path / "in", job, lambda _name: BF16, config={"torch_dtype": "bfloat16"})
    run, control = create_run("begun"), LoneControl()
    spec = spec_of(job).model_copy(update={"weights": str(tmp_path / "in")})
    told_of = adopt_initial_weights(spec, run, control, "float32")
    assert (told_of.is_hashed, told_of.dtypes) == (False, {"bfloat16": len(tensors)})
    assert (told_of.notes, sorted(told_of.carried)) == ((), sorted(BESIDE))
    text = str(told_of)
    assert f"({len(tensors)} bfloat16 tensors, kept in float32; no SHA256SUMS found)" in text
    kept = read_base_model(run.path)
    assert kept is not None
    assert kept.dtypes == {name.removeprefix("model."): "bfloat16" for name in tensors}
    sums(tmp_path / "in")
    assert adopt_initial_weights(spec, run, control, "float32").is_hashed
    damage_flip(tmp_path / "in")
    with pytest.raises(UsageError, match=r"model\.weights: .*it has other bytes in model\.safetensors;"):
        adopt_initial_weights(spec, run, control, "float32")
    again = read_base_model(run.path)
    assert again == kept, "what was kept before stays"
    assert [path.name for path in run.path.glob(".base*")] == []


def test_weights_that_training_would_round_are_refused_before_a_job_is_queued(
    job: Path, tmp_path: Path, runs_root: Path
) -> None:
    make(tmp_path / "in", job, lambda name: F64 if "norm" in name else F32)
    words = [f"model.weights={tmp_path / 'in'}"]
    with pytest.raises(SpecError, match=r"model\.weights.*float64, but this job keeps weights in float32"):
        check_job_inputs(load_job(job, words))
    check_job_inputs(load_job(job, [*words, "train.precision=fp64"]))
    (tmp_path / "in" / SINGLE).unlink()
    os.mkfifo(tmp_path / "in" / SINGLE)
    with pytest.raises(SpecError, match=r"has neither model\.safetensors nor"):
        check_job_inputs(load_job(job, words))
