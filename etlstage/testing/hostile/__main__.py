"""
What runs when the interpreter is given this folder as its program.

So all else here is a package of its own, and is compiled once and not at every start.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # it is this folder

from hostile.program import main  # type: ignore[import-not-found]  # noqa: E402

main(sys.argv[1:])
