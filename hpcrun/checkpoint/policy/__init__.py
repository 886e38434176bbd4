"""How often to save at which tier, and what is kept."""
