"""The search for cases that make a worker fail, shortened and stored."""
