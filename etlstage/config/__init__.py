"""
From the pipeline file to objects that run.

``document.py`` knows YAML and places, ``model.py`` what may stand where,
``loader.py`` puts the two together, ``build.py`` makes a pipeline of it.
"""
