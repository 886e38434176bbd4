"""The checkpoint worker: a save's way from memory through the levels, beside training."""
