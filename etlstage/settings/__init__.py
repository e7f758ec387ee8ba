"""
Settings, which are defined once and read wherever they are written.

``kind.py`` and ``units.py`` read values as people write them, ``problem.py`` describes
wrong values, ``definition.py`` finds the settings of a class, and ``schema.py``
describes them to an editor. The settings themselves are declared by classes in
``etlstage.stage``, ``etlstage.config`` and each dialect.

pydantic would do most of this, but its core is compiled: Spark's executors get etlstage
as a zip of pure Python, and stages are made there, too.
"""
