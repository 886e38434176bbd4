"""Faults injected into one of your running runs, one by one or as a scenario."""
