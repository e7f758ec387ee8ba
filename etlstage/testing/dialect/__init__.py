"""
What tests know of a dialect: how its bytes are cut, shown, and written.

``kit.py`` has what is so for any dialect, and finds what one knows better: a module
with its name has it here, and an entry point that of a dialect of another package.
"""

from __future__ import annotations

from etlstage.testing.dialect.kit import DialectKit as DialectKit
from etlstage.testing.dialect.kit import FrameReader as FrameReader
from etlstage.testing.dialect.kit import kit_of as kit_of

__all__ = ("DialectKit", "FrameReader", "kit_of")
