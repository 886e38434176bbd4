"""The base model of a run: what stood beside its first weights, kept for exports."""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.files import allowed_file_directories, open_regular, temporary_name
from hpcrun.specs.hf_directory import HF_CONFIG_FILE, SAFETENSORS_INDEX_FILE, read_hf_config
from hpcrun.specs.model import (
    HF_FAMILY_DEFAULTS,
    HF_FIXED_VALUES,
    ModelSpec,
    find_config_differences,
    make_hf_config,
)
from hpcrun.specs.records import read_json, sync_directory, write_json
from hpcrun.specs.sha256sums import SHA256SUMS_FILE, check_sha256sums, write_sha256sums

BASE_MODEL_DIRECTORY = "base_model"
"""The directory beside a run's saves, and beside an export that is no Hugging Face directory itself."""
_RECORD = "hpcrun.json"
_CARRIED = (
    *("generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer*", "*.model", "*.tiktoken", "tekken.json"),
    *("chat_template.json", "chat_template.jinja", "*preprocessor_config.json", "processor_config.json"),
    *("README.md", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*", "ACCEPTABLE_USE*"),
)
_GROUPS = {
    "tokenizer": ("tokenizer*", "*.model", "vocab.*", "tekken.json", "*.tiktoken"),
    "generation_config.json": ("generation_config.json",),
    "license": ("LICENSE*", "LICENCE*", "COPYING*"),
}
"""What a user misses first, where none of its files is there."""
_OURS = frozenset({HF_CONFIG_FILE, SAFETENSORS_INDEX_FILE, SHA256SUMS_FILE, _RECORD, "spec.yaml"})
_MOST_BYTES, _MOST_FILES = 256 << 20, 64


@dataclass(frozen=True)
class CarriedFiles:
    """What came along from a base model."""

    files: tuple[str, ...] = ()
    absent: tuple[str, ...] = tuple(_GROUPS)
    """Of the tokenizer, the generation settings and the license what was not there."""
    left: tuple[str, ...] = ()
    """What was there and stays behind: code, pickles, folders, links that lead elsewhere."""
    source: str | None = None
    """Where the base model was read from; None for a run that began with weights of its own."""


@dataclass(frozen=True)
class HfBaseModel:
    """What a run knows of the model that it began with."""

    directory: Path
    source: str
    dtypes: dict[str, str]
    """From our name of a tensor to the type it was stored in, in torch's words."""
    config: dict[str, Any] | None

    def carry(self, target: Path) -> CarriedFiles:
        """Its files into an export; UsageError where they are not those that were kept."""
        check_sha256sums(self.directory)
        return _copy_files(self.directory, target, self.source)


def keep_base_model(
    source: Path, place: Path, dtypes: dict[str, str]
) -> AbstractContextManager[CarriedFiles]:
    """Keep what is not a tensor of a Hugging Face directory as `place`/base_model, once the body ended well.

    It is copied before the body, so that a full disk is met first, and replaces what is there.
    """
    return _keep_files(source, place, str(source.absolute()), dtypes)


def copy_base_model(place: Path, target: Path) -> AbstractContextManager[object]:
    """A base model, where there is one, from beside one state to beside another, once the body ended well."""
    base = read_base_model(place)
    if base is None:
        return nullcontext()
    check_sha256sums(base.directory)
    return _keep_files(base.directory, target, base.source, base.dtypes)


@contextmanager
def _keep_files(directory: Path, place: Path, source: str, dtypes: dict[str, str]) -> Iterator[CarriedFiles]:
    aside, final = place / temporary_name(BASE_MODEL_DIRECTORY), place / BASE_MODEL_DIRECTORY
    aside.mkdir(mode=0o700)
    try:
        carried = _copy_files(directory, aside, source)
        with suppress(FileNotFoundError, ValueError):  # a config.json that is none is told of by who reads it
            write_json(aside / HF_CONFIG_FILE, read_hf_config(directory))
        write_json(aside / _RECORD, {"schema_version": 1, "source": source, "dtypes": dtypes})
        write_sha256sums(aside)
        sync_directory(aside)
        yield carried
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        sync_directory(place)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def read_base_model(place: Path) -> HfBaseModel | None:
    """The base model that is kept in a run's directory; None where there is none."""
    directory = place / BASE_MODEL_DIRECTORY
    record = read_json(directory / _RECORD)
    if record is None:
        return None
    source, dtypes = map(record.get, ("source", "dtypes")) if isinstance(record, dict) else (None, None)
    if not isinstance(source, str) or not isinstance(dtypes, dict):
        raise UsageError(
            f"{directory / _RECORD}: is damaged: it has no source and dtypes; remove {directory}"
        )
    try:
        config = read_hf_config(directory)
    except FileNotFoundError:
        config = None
    except ValueError as error:
        raise UsageError(f"{error}; remove {directory} to export without a tokenizer") from None
    return HfBaseModel(directory, source, {str(name): str(dtype) for name, dtype in dtypes.items()}, config)


def make_export_config(
    spec: ModelSpec, base: HfBaseModel | None, dtype: str
) -> tuple[dict[str, Any], list[str]]:
    """The config.json of an export, and where the base model's says something else than the run.

    All that the base model's says and we know nothing of stays in it.
    """
    if base is None or base.config is None:
        return make_hf_config(spec) | {"torch_dtype": dtype}, []
    differing, config = find_config_differences(spec, base.config), dict(base.config)
    if differing:
        kept = (
            {"architectures", "model_type", "bos_token_id", "eos_token_id"}
            if config.get("model_type") in HF_FAMILY_DEFAULTS
            else set()
        )
        config |= {key: value for key, value in HF_FIXED_VALUES.items() if key in config}
        config |= {
            key: value for key, value in make_hf_config(spec).items() if key not in kept & config.keys()
        }
    for key in [key_name for key_name in ("dtype", "torch_dtype") if key_name in config] or ["torch_dtype"]:
        config[key] = dtype
    return config, [f"{HF_CONFIG_FILE} of the base model: {text}; the run's counts" for text in differing]


def _copy_files(source: Path, target: Path, name: str) -> CarriedFiles:
    files, left = list[str](), list[str]()
    for path in sorted(source.iterdir()):
        if path.name in _OURS or path.name.startswith(".") or path.suffix == ".safetensors":
            continue
        is_carried = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _CARRIED)
        if is_carried and len(files) < _MOST_FILES and _is_sound(source, path):
            _copy_file(path, target / path.name)
            files.append(path.name)
        else:
            left.append(path.name)
    absent = [
        group
        for group, patterns in _GROUPS.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for name in files for pattern in patterns)
    ]
    return CarriedFiles(tuple(files), tuple(absent), tuple(left), name)


def _is_sound(source: Path, path: Path) -> bool:
    """Whether this is a file of the directory itself, or of Hugging Face's cache, and not too large."""
    home = source.resolve()
    try:
        status = path.stat()
    except OSError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_size <= _MOST_BYTES
        and path.resolve().parent in allowed_file_directories(home)
    )


def _copy_file(source: Path, target: Path) -> None:
    """A file that was found sound, synced, never more than the bound."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(open_regular(source, follow=True), "rb") as old, os.fdopen(descriptor, "wb") as new:
        left = _MOST_BYTES
        while left > 0 and (piece := old.read(min(left, 1 << 20))):
            new.write(piece)
            left -= len(piece)
        new.flush()
        os.fsync(new.fileno())
