"""The values that pass between the stages, the run directory they live in, and the files people write."""
