from __future__ import annotations

from tests.supervisor.conftest import _nothing_is_left as _nothing_is_left
