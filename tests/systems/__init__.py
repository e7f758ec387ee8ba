"""Whole systems, drawn at random: what they load while processes are killed."""
