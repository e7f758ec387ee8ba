"""
From the pipeline file to objects that run.

``reading.py`` knows YAML, ``document.py`` places, ``model.py`` and ``stages.py`` what
may stand where, ``end.py`` and ``ends`` where messages come from and go to, ``rules.py``
what goes together, ``presence.py`` what there is on this machine; ``loader.py`` puts
these together, ``build.py`` makes a pipeline of it.
"""
