"""
What runs when the interpreter is given this folder as its program.

So ``program.py`` is a module, and is compiled once and not at every start.
"""

from __future__ import annotations

import sys

from program import main  # type: ignore[import-not-found]

main(sys.argv[1:])
