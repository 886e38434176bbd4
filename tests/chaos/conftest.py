"""Runs under a supervisor, for the tests of this room."""

from tests.launch.supervised import nothing_left, site

__all__ = ["nothing_left", "site"]
