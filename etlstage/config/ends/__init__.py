"""
Where messages may come from and go to: a module for each end, which says all of it.

``etlstage/config/end.py`` is what each has to answer; ``registry`` there finds it by its
name. No other module knows one of them.
"""
