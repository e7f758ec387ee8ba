"""Processes and their pipes."""
