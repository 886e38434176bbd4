"""The supervisor's side of checkpoints: what an attempt restores, and how far its saves get."""
