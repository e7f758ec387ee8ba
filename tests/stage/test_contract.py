from __future__ import annotations

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ReplyContract, Stage


@pytest.mark.parametrize(
    ("contract", "outputs", "flaw"),
    [
        (ReplyContract(), [b"x", b"y"], ""),
        (ReplyContract(outputs=1), [b"x"], ""),
        (ReplyContract(outputs=0), [], ""),
        (ReplyContract(outputs=1), [], "breaks expect.outputs: 0 outputs, not 1"),
        (
            ReplyContract(outputs=2, json=True),
            [b"x"],
            "breaks expect.outputs: 1 output, not 2",
        ),
        (ReplyContract(json=True), [], ""),
        (ReplyContract(json=True), [b'{"a": [1, null]}', b" 1"], ""),
        (
            ReplyContract(json=True),
            [b"1", b"{"],
            "breaks expect.json: output 2 is no JSON document",
        ),
        *(
            (
                ReplyContract(json=True),
                [text],
                "breaks expect.json: output 1 is no JSON document",
            )
            for text in (b"", b"NaN", b"[Infinity]", b"\xff", b"1 2", b"[" * 10**5)
        ),
    ],
)
def test_flaw(contract: ReplyContract, outputs: list[bytes], flaw: str) -> None:
    """What was promised, and nothing of the reply itself (issue 26)."""
    assert contract.flaw(outputs) == flaw
    assert contract.given == (contract != ReplyContract())


def test_only_where_each_message_has_a_reply() -> None:
    """A batch is answered as a whole, and a load worker has no outputs (issue 26)."""
    batches = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    with pytest.raises(ConfigError, match="expect: is not for workers that answer a"):
        Stage(name="s", worker=("a",), expect=ReplyContract(outputs=1), dialect=batches)
    with pytest.raises(ConfigError, match="expect: is not for a load stage"):
        Stage(
            name="s",
            worker=("a",),
            expect=ReplyContract(json=True),
            kind=StageKind.LOAD,
        )
    assert Stage(name="s", worker=("a",), dialect=batches).expect == ReplyContract()
    single = Stage(name="s", worker=("a",), expect=ReplyContract(outputs=1))
    assert single.expect.outputs == 1
