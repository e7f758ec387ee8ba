"""
Turn a pipeline file into objects that run.

``reading.py`` reads YAML, ``document.py`` keeps the places of values, ``model.py`` and
``stages.py`` define the keys, ``end.py`` and ``ends`` where messages come from and go
to, ``rules.py`` which values can be combined; ``presence.py`` checks what exists on
this machine. ``loader.py`` combines these, and ``build.py`` makes a pipeline.
"""
