"""Parity between nodes: sets, arithmetic, the talk between workers, and lost parts made again."""
