"""Sends programs to the executors before a job runs there."""
