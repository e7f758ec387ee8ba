"""Stages inside Spark's executors: one for a DataFrame, or a whole chain of them."""
