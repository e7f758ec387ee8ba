"""Shards and their leases."""
