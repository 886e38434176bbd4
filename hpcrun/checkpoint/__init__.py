"""Saved state on storage that nobody trusts: format, commit, and a reader that proves what it reads."""
