"""State that outlives a run."""
