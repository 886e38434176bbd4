"""What became of a run: its snapshot, events as text, goodput ledger, post-mortem, and requests to it."""
