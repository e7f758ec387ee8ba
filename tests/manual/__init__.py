"""The fences in README and in the pages of ``etlstage/docs`` are run."""
