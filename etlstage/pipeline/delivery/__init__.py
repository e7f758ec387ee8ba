"""What outlives a run: positions, and the lock on them."""
