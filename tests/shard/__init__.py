"""Tests of shards and their leases."""
