"""Saves in the memory of nodes: the drain worker on each, and what the supervisor makes of what they hold."""
