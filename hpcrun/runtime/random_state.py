"""The random state of a rank: torch's on the CPU and on its GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def rng_state() -> Tensor:
    """Return this rank's random state, of the CPU and of its GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def set_rng_state(state: Tensor) -> None:
    """Set a state that `rng_state` returned."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if state.numel() > size:
        torch.cuda.set_rng_state(state[size:])
