"""Streams of Kinesis in a pipeline file."""

from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.config.loader import examine
from etlstage.errors import ConfigError


@pytest.mark.parametrize(
    "begin", ["nan", "1e400", "-1e17", "1e12", "9999-12-31T23:00:00-12:00"]
)
def test_begin_that_is_no_time(tmp_path: Path, begin: str) -> None:
    """It is refused where it is written (issue 26)."""
    path = tmp_path / "p.yaml"
    path.write_text(
        "name: p\nstate: s\n"
        f"extract: {{kinesis: {{stream: s, from: '{begin}'}}}}\n"
        "load: {worker: [cat], dialect: kcl}\n"
    )
    with pytest.raises(ConfigError) as caught:
        examine(path)
    (problem,) = caught.value.problems
    assert problem == (
        f"{path}:3:38: extract.kinesis.from: is '{begin}', expected trim_horizon,"
        " latest, seconds since 1970, or a time such as 2026-11-23T18:00:00Z"
    )
