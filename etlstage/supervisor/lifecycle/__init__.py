"""The life of the workers, without I/O: events in, instructions out."""
