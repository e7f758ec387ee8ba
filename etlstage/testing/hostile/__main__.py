"""
The entry point when the interpreter is given this folder as its program.

It imports the folder as a package, which is compiled once and not at every start.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # it is this folder

from hostile.program import main  # type: ignore[import-not-found]  # noqa: E402

main(sys.argv[1:])
