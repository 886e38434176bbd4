"""Slurm from outside: what its commands print, by version, as plain values."""
