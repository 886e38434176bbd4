"""What a run goes on from, and what is made whole again out of other copies."""
