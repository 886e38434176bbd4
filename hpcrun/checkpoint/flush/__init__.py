"""The checkpoint worker: a save's way from memory through the tiers, beside training."""
