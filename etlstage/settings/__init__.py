"""
How settings are defined, once, and read wherever they are written.

``kind.py`` and ``units.py`` know values as people write them, ``problem.py`` what is
reported of wrong ones, ``definition.py`` the settings of a class, and ``schema.py`` how to
describe them to an editor. What settings there are is
declared by the classes themselves, in ``etlstage.stage``, ``etlstage.config`` and by each
dialect.

pydantic would do most of this, but its core is compiled: Spark's executors get
etlstage as a zip of pure Python, and stages are made there, too.
"""
