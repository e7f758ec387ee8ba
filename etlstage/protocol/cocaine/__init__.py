"""
Dialect ``cocaine``: workers written for the Cocaine application platform.

Source: the worker protocol of its frameworks and, where that text and the runtimes
differ, what the runtimes and the frameworks do. Frames are msgpack; the extra
``cocaine`` installs the package of that name.
"""

from __future__ import annotations

from etlstage.protocol.cocaine.frame import CocaineVersion as CocaineVersion
from etlstage.protocol.cocaine.frame import Encoding as Encoding
from etlstage.protocol.cocaine.session import CocaineSession as CocaineSession
from etlstage.protocol.cocaine.session import Deadlines as Deadlines

__all__ = ("CocaineSession", "CocaineVersion", "Deadlines", "Encoding")
