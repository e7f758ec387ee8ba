"""The data set, the workers and the pipeline of ``etlstage demo``."""
