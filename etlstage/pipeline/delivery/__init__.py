"""The state that outlives a run: positions and records, and the lock on them."""
