"""Starts a world of ranks, watches it, and leaves nothing behind."""
