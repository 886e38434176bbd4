"""What NCCL's logs tell: the choices made, what was applied, and what the warnings mean."""
