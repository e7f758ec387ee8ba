"""Stages inside a Spark task."""
