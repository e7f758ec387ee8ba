"""Engines ``spark`` and ``streaming``: runs whose stages are inside the executors."""
