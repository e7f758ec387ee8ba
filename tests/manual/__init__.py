"""README and the pages in ``etlstage/docs``: what is fenced is run."""
