"""
Workers and a pipeline to copy, as package data.

``workers/`` holds every scenario of the stage protocol in plain Python, with the SDK,
in POSIX shell with awk, and in Node; ``demo/`` the data set and the pipeline of
``etlstage demo``; ``asgi/`` and ``trio/`` services that embed a supervisor. Nothing
here is imported: ``etlstage init`` writes the files out, and each one runs as a program
of its own.
"""
