"""Whether ranks make progress: heard, timed, looked into, compared."""
