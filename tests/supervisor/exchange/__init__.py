"""The messages of a stage, without I/O."""
