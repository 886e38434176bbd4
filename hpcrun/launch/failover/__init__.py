"""Another supervisor takes over: the lease that says who leads, and what a successor knows and does."""
