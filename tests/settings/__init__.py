"""How settings are defined and read."""
