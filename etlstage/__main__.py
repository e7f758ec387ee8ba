"""Run the command line: ``python -m etlstage``."""

from __future__ import annotations

from etlstage.cli import main

if __name__ == "__main__":
    main()
