"""The messages of a stage, without I/O: from submission to outcome."""
