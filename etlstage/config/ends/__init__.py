"""
Where messages may come from and go to: a self-contained module for each end.

``etlstage/config/end.py`` defines the interface of an end; ``ends()`` there finds ends
by name. ``row.py`` has what the ends with rows share.
"""
