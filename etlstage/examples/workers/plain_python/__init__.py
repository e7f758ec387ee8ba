"""Example workers in plain Python: the protocol spelled out, standard library only."""
