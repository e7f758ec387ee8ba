"""DataFrames as ends of a pipeline."""
