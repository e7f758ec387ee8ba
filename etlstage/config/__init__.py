"""
From the pipeline file to objects that run.

``document.py`` knows YAML and places, ``model.py`` and ``worker.py`` what may stand
where, ``loader.py`` puts these together, ``build.py`` makes a pipeline of it.
"""
