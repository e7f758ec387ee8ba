"""The search for messages that break a worker, made short and kept."""
