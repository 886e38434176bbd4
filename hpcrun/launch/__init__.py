"""Starts a world of ranks, watches it, and leaves nothing behind; the rooms in it have a subject each."""
