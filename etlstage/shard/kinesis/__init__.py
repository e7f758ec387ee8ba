"""
Kinesis as a stream with shards, read over its API with boto3 (extra ``kinesis``).

``source.py`` reads the stream, ``aggregate.py`` unpacks aggregated records.
"""
