"""Whether nodes are well: looked at before an attempt, remembered after faults."""
