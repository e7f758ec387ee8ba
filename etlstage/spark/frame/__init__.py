"""DataFrames at the ends of a pipeline: read as messages, loaded from messages."""
