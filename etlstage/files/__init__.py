"""Files as the ends of a pipeline, by Arrow: no JVM, and nothing to start."""
