"""What of a job describes a state of training: the only part that comes with one from elsewhere, or goes out.

Everything else runs something, names a place or a secret, or belongs to one site. The table names every key
of JobSpec; a test fails for one that is missing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrun.specs.resolve import default_job_values

PORTABLE_KEYS: dict[str, bool | dict[str, bool]] = {
    "name": True,
    "model": {
        "preset": True,
        "hf": False,
        "vocab": True,
        "hidden": True,
        "ffn": True,
        "layers": True,
        "heads": True,
        "kv_heads": True,
        "head_dim": True,
        "rope_theta": True,
        "rope_scaling": True,
        "norm_eps": True,
        "tied": True,
        "context": True,
        "init_std": True,
        "weights": False,
    },
    "data": True,
    "parallel": True,
    "train": {
        "steps": True,
        "mbs": True,
        "gbs": True,
        "lr": True,
        "lr_scaling": True,
        "min_lr": True,
        "warmup": True,
        "schedule": True,
        "decay": True,
        "weight_decay": True,
        "betas": True,
        "eps": True,
        "grad_clip": True,
        "precision": True,
        "recompute": True,
        "seed": True,
        "eval": True,
        "compile": True,
        "profile": False,
    },
    "checkpoint": {
        "every": True,
        "keep": True,
        "keep_every": True,
        "at_end": True,
        "memory": False,
        "local": False,
        "parity": False,
        "replicate_to_spares": False,
        "durable": False,
        "object": False,
        "on_backlog": False,
        "flush_duty": False,
        "max_durable_age": False,
        "durability_action": False,
    },
    "resources": {
        "nodes": True,
        "gpus_per_node": True,
        "ranks_per_node": True,
        "cpus_per_rank": False,
        "spares": False,
        "time": False,
        "mem": False,
        "account": False,
        "partition": False,
        "qos": False,
        "constraint": False,
        "reservation": False,
        "exclude": False,
        "exclusive": False,
        "placement": False,
        "nodelist": False,
        "switches": False,
        "switches_wait": False,
        "segment": False,
        "topo_exclusive": False,
        "sbatch": False,
    },
    "device": True,
    "env": False,
    "env_deny": False,
    "modules": False,
    "python": False,
    "container": False,
    "secrets": False,
    "retry": False,
    "watch": False,
    "preflight": False,
    "telemetry": False,
    "hooks": False,
    "elastic": False,
    "sweep": False,
    "cluster": False,
    "command": False,
}
"""Keys of a job, and of the sections that are divided: whether they describe a state."""


def portable_part(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Of the values of a job those that describe a state, and the dotted keys of others that were set."""
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for key, value in values.items():
        rule = PORTABLE_KEYS.get(key, False)
        if isinstance(rule, dict) and isinstance(value, Mapping):
            kept[key] = {name: entry for name, entry in value.items() if rule.get(name, False)}
            others = {name: entry for name, entry in value.items() if not rule.get(name, False)}
            dropped += _keys_set(others, default_job_values().get(key) or {}, f"{key}.")
        elif rule:
            kept[key] = value
        else:
            dropped += _keys_set({key: value}, default_job_values(), "")
    return kept, dropped


def _keys_set(values: Mapping[str, Any], plain: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The keys with values that are not the defaults."""
    yield from (f"{prefix}{key}" for key, value in values.items() if value != plain.get(key))
