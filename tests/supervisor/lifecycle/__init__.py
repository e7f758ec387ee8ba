"""The life of the workers, without I/O."""
