"""Tests of the pipeline file."""
