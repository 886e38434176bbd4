"""Faults on purpose, on a running run of one's own."""
