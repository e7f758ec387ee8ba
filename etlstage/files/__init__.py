"""Files as the ends of a pipeline, read and written by Arrow, without a JVM."""
