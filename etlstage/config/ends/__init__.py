"""
Where messages may come from and go to: a module for each end, with all of it.

``etlstage/config/end.py`` is what each has to answer; ``ends()`` there finds it by its
name. ``row.py`` is what those of rows have in common.
"""
