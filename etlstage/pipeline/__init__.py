"""E -> T* -> L: sources, stages and sinks joined to a run."""
