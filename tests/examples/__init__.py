"""The example workers and the demo, each run as the program it is."""
