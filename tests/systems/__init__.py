"""Whole systems, drawn at random: what they load, whatever is killed meanwhile."""
