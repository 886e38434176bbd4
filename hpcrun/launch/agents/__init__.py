"""A supervisor and its agents: the wire between them, and who leads."""
