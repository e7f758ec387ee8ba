"""Pipelines, with ends in memory and with workers."""
