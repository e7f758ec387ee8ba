"""A TCP service on trio whose lines are answered by workers."""
