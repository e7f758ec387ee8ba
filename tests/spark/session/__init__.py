"""Tests of the Spark layer, most of them against a real session."""
