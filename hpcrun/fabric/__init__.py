"""The fabric: which node hangs below which switch, what a link carries, and which rank goes where."""
