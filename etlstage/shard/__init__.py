"""
Shards: shares of an input that belong to one runner each, and which has which.

``lease.py`` has what is kept of each shard, ``keeper.py`` decides what a runner does
about it, ``table.py`` keeps it where several runners see it.
"""
