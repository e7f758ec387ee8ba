"""Start, feed, watch and stop the workers of a stage."""
