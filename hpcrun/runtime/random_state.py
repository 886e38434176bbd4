"""The random state of a rank: torch's own, on the CPU and on its GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def rng_state() -> Tensor:
    """The random state of this rank, of the CPU and of its GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_rng_state(state: Tensor) -> None:
    """Set what `rng_state` gave."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if state.numel() > size:
        torch.cuda.set_rng_state(state[size:])
