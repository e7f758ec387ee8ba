"""Example workers with the SDK: the scenarios of ``plain_python`` in a few lines."""
