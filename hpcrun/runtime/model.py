"""The decoder: Llama's network under Hugging Face's parameter names, whole or one pipeline stage of it."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hpcrun.specs.model import ModelSpec

Recompute = Literal["none", "selective", "full"]

# What costs most to compute again: the weights' matmuls and the attention core, in every backend's name.
_SAVED_BY_SELECTIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
]
_selective_contexts = functools.partial(create_selective_checkpoint_contexts, _SAVED_BY_SELECTIVE)


class RotaryTables:
    """cos and sin of the rotary angles, shape (S, head_dim / 2), made once for each device and dtype.

    No module and no buffers, so that a model built on the meta device has nothing to fill in again.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first seq_len rows of both tables."""
        tables = self._tables.get((device, dtype))
        if tables is None or len(tables[0]) < seq_len:
            # a table first made under inference_mode could never be saved for a backward later
            with torch.inference_mode(False), torch.no_grad():
                tables = self._tables[device, dtype] = self._compute(seq_len, device, dtype)
        cos, sin = tables
        return cos[:seq_len], sin[:seq_len]

    def _compute(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = rotary_frequencies(self._spec, device, exact)
        angles = torch.outer(torch.arange(seq_len, device=device, dtype=exact), frequencies)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary_frequencies(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Radians a position for each pair of a head, shape (head_dim / 2,), with Llama 3's scaling if any.

    Wavelengths up to original_context / high_freq_factor stay, those from original_context /
    low_freq_factor on are stretched by factor, and between them the frequency is interpolated.
    """
    exponents = torch.arange(0, spec.head_dim, 2, device=device, dtype=dtype) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    rotations = scaling.original_context * frequencies / (2 * math.pi)
    kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0.0, 1.0))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of x (B, S, heads, head_dim) by its angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Causal grouped-query attention over (B, S, h)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = _linear(spec.hidden, spec.heads * spec.head_dim)
        self.k_proj = _linear(spec.hidden, spec.kv_heads * spec.head_dim)
        self.v_proj = _linear(spec.hidden, spec.kv_heads * spec.head_dim)
        self.o_proj = _linear(spec.heads * spec.head_dim, spec.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend; the tables are plain tensors over the whole sequence, also under tensor parallelism."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
            # CUDA's only kernel for grouped heads in full precision keeps an S × S matrix; this does not.
            groups = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        # a tensor-parallel rank holds a share of the heads: their number follows from the width
        return x.view(*x.shape[:2], -1, self.head_dim)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = _linear(spec.hidden, spec.ffn)
        self.up_proj = _linear(spec.hidden, spec.ffn)
        self.down_proj = _linear(spec.ffn, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, h) to (B, S, h)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each after its norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.input_layernorm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.mlp = FeedForward(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, h) to (B, S, h); what backward needs is kept or computed again as `recompute` says."""
        # inside the block and not around it, so that parameter names stay as they are
        if self.recompute == "none":
            return self._forward(x, cos, sin)
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        # the compiler wants to see which contexts are meant, and none where there are none
        if self.recompute == "selective":
            out: Tensor = checkpoint(self._forward, x, cos, sin, context_fn=_selective_contexts, **settings)
        else:
            out = checkpoint(self._forward, x, cos, sin, **settings)
        return out

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """A whole model, or the stage of it that holds `layers`, which keep their global numbers in all names.

    Its weights are arbitrary until they are initialised or loaded.
    """

    seq_shards: int = 1
    """Ranks along which a stage without embedding receives the sequence cut (sequence parallelism)."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: range | None = None,
        embed: bool = True,
        head: bool = True,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        layers = range(spec.layers) if layers is None else layers
        assert all(0 <= index < spec.layers for index in layers), f"{layers} of {spec.layers} layers"
        assert spec.heads % spec.kv_heads == 0, f"{spec.heads} heads on {spec.kv_heads} key-value heads"
        assert spec.head_dim % 2 == 0, f"rotary positions turn pairs; head_dim is {spec.head_dim}"
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden) if embed else None
        self.layers = nn.ModuleDict({str(index): Block(spec, recompute) for index in layers})
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps) if head else None
        self.lm_head = _linear(spec.hidden, spec.vocab) if head else None
        self._rotary = RotaryTables(spec)
        self.tie_weights()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, S) or hidden (B, S, h) to logits (B, S, V), or to hidden without the head."""
        if self.embed_tokens is None:
            seq_len = x.shape[1] * self.seq_shards
        else:
            seq_len = x.shape[1]
            x = self.embed_tokens(x)
        cos, sin = self._rotary(seq_len, x.device, x.dtype)
        for block in self.layers.values():
            x = block(x, cos, sin)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x

    def tie_weights(self) -> None:
        """Let the head use the embedding's parameter if the model is tied and both are here.

        Call it again after parameters were replaced, as tensor parallelism does.
        """
        if self.spec.tied and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to_empty on meta weights gives each module a parameter of its own
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie_weights()
        return self


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of the whole model by name; a tied head is no parameter of its own."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(spec).named_parameters()}


def canonical_name(spec: ModelSpec, name: str) -> str:
    """The name under which a parameter's values are drawn and stored: a tied head is the embedding."""
    return "embed_tokens.weight" if spec.tied and name == "lm_head.weight" else name


_BLOCK_ELEMENTS = 1 << 20
"""Elements drawn from one generator: a rank draws only the blocks that its rows touch."""


def initial_value(
    spec: ModelSpec,
    name: str,
    shape: tuple[int, ...],
    seed: int,
    *,
    rows: slice | None = None,
) -> Tensor:
    """Return a parameter's first values, float32 on the CPU, the same for every layout.

    `shape` is the whole parameter's, `rows` the part of its first dimension that is wanted. Norms are 1;
    matrices normal with init_std, and those that write to the residual stream with
    init_std / sqrt(2 layers), so that its variance does not grow with depth.
    """
    begin, end, _ = (rows or slice(None)).indices(shape[0])
    if name.endswith("norm.weight"):
        return torch.ones((end - begin, *shape[1:]), dtype=torch.float32)
    name = canonical_name(spec, name)
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = spec.init_std / math.sqrt(2 * spec.layers) if residual else spec.init_std
    # drawn on the CPU in float32 always: generators of other devices and dtypes give other numbers
    value = torch.empty((end - begin, *shape[1:]), dtype=torch.float32, device="cpu")
    height = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
    for block in range(begin // height, -(-end // height)):
        digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        top, bottom = block * height, min((block + 1) * height, shape[0])
        drawn = torch.empty((bottom - top, *shape[1:]), device="cpu").normal_(0.0, std, generator=generator)
        first, last = max(top, begin), min(bottom, end)
        value[first - begin : last - begin] = drawn[first - top : last - top]
    return value


def initialise_parameters(module: Decoder, spec: ModelSpec, seed: int) -> None:
    """Fill a model or stage that is not parallelised with its first values, in place."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_value(spec, name, tuple(parameter.shape), seed))


def loss_function(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross entropy in nats of logits (B, S, V), at least in float32: mean or sum over tokens not masked.

    Logits may be a DTensor cut along the vocabulary, inside torch's loss_parallel.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
