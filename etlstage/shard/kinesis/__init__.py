"""
Kinesis as a stream with shards, by its API, over boto3 of the extra ``kinesis``.

``source.py`` reads it, ``aggregate.py`` knows what producers put into one record.
"""
