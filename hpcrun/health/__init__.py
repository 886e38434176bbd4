"""Whether nodes are well: preflight checks before an attempt, and lemon nodes remembered after faults."""
