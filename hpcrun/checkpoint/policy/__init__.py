"""How often to save at which level, and what is kept."""
