"""NCCL's own cost model, and what it predicts."""
