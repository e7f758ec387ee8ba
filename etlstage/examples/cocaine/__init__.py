"""A worker with many sessions at once, and a service that speaks with it."""
