"""
How settings are defined, once, and read wherever they are written.

``kind.py`` knows values as people write them, ``definition.py`` the settings of a
class, ``schema.py`` how to describe both to an editor. What settings there are is
said by the classes themselves, in ``etlstage.stage``, ``etlstage.config`` and by each
dialect.

pydantic would do most of this, but its core is compiled: Spark's executors get
etlstage as a zip of pure Python, and stages are made there, too.
"""
