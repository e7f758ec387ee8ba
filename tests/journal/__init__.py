"""Journals in a folder, in memory, and of a broker."""
