"""Closed forms for sizes and FLOPs; every other room takes its figures from here.

Symbols: L layers, h hidden, f ffn, kd = kv_heads * head_dim, qd = heads * head_dim, V vocab, s sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Protocol


class DecoderShape(Protocol):
    """The sizes of a decoder that the formulas need; ModelSpec has them."""

    @property
    def layers(self) -> int:
        """Number of blocks."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""

    @property
    def ffn(self) -> int:
        """Width inside the gated feed-forward."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""


def layer_parameters(model: DecoderShape) -> int:
    """Parameters of one block: 2 h qd + 2 h kd + 3 h f + 2 h (q, o; k, v; gated FFN; two norms)."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return 2 * model.hidden * (q + kv) + 3 * model.hidden * model.ffn + 2 * model.hidden


def model_parameters(model: DecoderShape) -> int:
    """Parameters of the whole model: L blocks, embedding, final norm, and the head unless tied."""
    embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
    return model.layers * layer_parameters(model) + embeddings + model.hidden


def layer_flops_per_token(model: DecoderShape, seq_len: int, *, causal: bool = True) -> float:
    """Forward FLOPs of one block a token: 2 a weight, and the attention core 4 s qd, half when causal."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    weights = 2 * model.hidden * (q + kv) + 3 * model.hidden * model.ffn
    return 2.0 * weights + 4.0 * seq_len * q * (0.5 if causal else 1.0)


def head_flops_per_token(model: DecoderShape) -> float:
    """Forward FLOPs of the output head a token: 2 h V."""
    return 2.0 * model.hidden * model.vocab


def train_flops_per_token(model: DecoderShape, seq_len: int, *, causal: bool = True) -> float:
    """Model FLOPs of a training step a token: three forwards (backward counts twice), no recompute.

    With full attention that is 6 (L (2 h qd + 2 h kd + 3 h f) + h V) + 12 L s qd; causal halves the core.
    """
    blocks = model.layers * layer_flops_per_token(model, seq_len, causal=causal)
    return 3.0 * (blocks + head_flops_per_token(model))


_DENSE_PEAK_BF16 = (
    # (part of the device's name, dense bf16 FLOP/s); vendors' data sheets
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
)
_DENSE_PEAK_FP32 = (
    # without tensor cores: the precision `fp32` here never turns TF32 on
    ("H200", 67e12),
    ("H100 PCIe", 51e12),
    ("H100", 67e12),
    ("GH200", 67e12),
    ("A100", 19.5e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a device in the precision in use, or None for one that is not in the table."""
    table = {"bf16": _DENSE_PEAK_BF16, "fp32": _DENSE_PEAK_FP32}.get(precision, ())
    for part, flops in table:
        if part in device_name:
            return flops
    return None


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the median by order statistics: binomial, whatever the values' shape.

    From the k-th smallest to the k-th largest value it holds the median but with 2 P(B(n, 1/2) < k); k is the
    largest with at most 1 - level of that. Values too few for any, below 6 at 95 %, give their whole range.
    """
    ordered, count = sorted(values), len(values)
    low, outside = 0, 0.0
    for k in range(count // 2):
        outside += comb(count, k) / 2.0**count
        if 2 * outside > 1 - level:
            break
        low = k
    return ordered[low], ordered[count - 1 - low]


def min_samples_for_median(level: float = 0.95) -> int:
    """How many values the median's interval takes at least: 6 for 95 %."""
    count = 1
    while 2 / 2.0**count > 1 - level:
        count += 1
    return count
