"""
Shards: shares of an input that are processed by one runner each, and their leases.

``lease.py`` defines the lease of a shard, ``keeper.py`` decides what a runner does
about leases, ``table.py`` stores them where several runners see them.
"""
