"""Measurements: sweeps of what the machine really does."""
