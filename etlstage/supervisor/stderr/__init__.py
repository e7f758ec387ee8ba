"""What a worker writes to stderr: read, understood, logged."""
