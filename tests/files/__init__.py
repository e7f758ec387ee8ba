"""Files as ends, without Spark."""
