"""hpcrun: distributed training on Slurm clusters, from the login node to the last checkpoint."""

__version__ = "0.1.0"
