"""What became of runs: followed, told, accounted for, and asked for more."""
