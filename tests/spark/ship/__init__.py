"""Shipping files and etlstage to the executors."""
