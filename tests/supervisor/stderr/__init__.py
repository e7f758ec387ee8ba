"""What a worker writes to stderr."""
