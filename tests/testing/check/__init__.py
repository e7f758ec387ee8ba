"""What ``etlstage check`` makes of workers that are known."""
