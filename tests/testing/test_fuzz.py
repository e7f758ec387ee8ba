"""Each planted bug is found, and shown by the shortest case that has it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import pytest

from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ReplyContract, Stage
from etlstage.testing import (
    Case,
    Fault,
    FaultKind,
    FaultPlan,
    ScriptedLaunch,
    Step,
    hostile_worker,
    verify,
)
from etlstage.testing.fuzzing.fuzz import (
    Budget,
    Found,
    Fuzzer,
    Progress,
    cases,
    large_cases,
)
from etlstage.testing.fuzzing.oracle import CaseFailed, FailureKind, Oracles
from etlstage.testing.fuzzing.shortening import shorten
from etlstage.testing.fuzzing.steps import literal
from etlstage.testing.scripted import Script
from etlstage.testing.strategies import json_messages, messages
from tests.testing.check import answerers as w
from tests.testing.fuzzed import searched

CRLF: Final = Markers(eom=b"\r\n")
EMPTY: Final = Case((Step((b"",)),))
TWICE: Final = Case((Step((b"",)), Step((b"",))))
FULL: Final = Case((Step((b"",) * 3),))
BATCH: Final = {"mode": Mode.BATCH_SUPERVISOR}
PLANTED: Final[list[tuple[Script, dict[str, Any], FailureKind, Case]]] = [
    (w.keeps_state, {"stateless": True}, FailureKind.STATELESS, TWICE),
    (w.loses_end_of_batch, {**BATCH, "one_output": True}, FailureKind.OUTPUTS, FULL),
    (
        w.loses_the_last_of_a_read,
        {},
        FailureKind.HANGS,
        Case((Step((b"", b"")),)),
    ),
    (w.dies_when_empty, {}, FailureKind.CRASHES, EMPTY),
    (w.takes_ascii, {}, FailureKind.CRASHES, Case((Step((b"\x80",)),))),
    (w.buffers, {}, FailureKind.HANGS, EMPTY),
    (
        w.answers_the_last_first,
        {"stateless": True},
        FailureKind.STATELESS,
        Case((Step((b"", b"x")),)),
    ),
    (w.answers_three_twice, BATCH, FailureKind.BREAKS, FULL),
    (w.decodes, {"one_output": True}, FailureKind.OUTPUTS, Case((Step((rb"\n",)),))),
    (w.dies_at_the_100th, {}, FailureKind.CRASHES, Case((Step((b"",)),) * 100)),
    (w.each(w.has_no_eop_without_output), {}, FailureKind.HANGS, EMPTY),
    (w.drops_repeated, {"one_output": True}, FailureKind.OUTPUTS, TWICE),
    (
        w.takes_reads_for_messages,
        {},
        FailureKind.BREAKS,
        Case((Step((b"x",), (1,)),)),
    ),
    (
        w.cuts_markers,
        {"markers": CRLF},
        FailureKind.HANGS,
        Case((Step((b"",), (1,)),), CRLF),
    ),
    (w.ends_with(1), {}, FailureKind.CRASHES, Case(())),
    (w.ignores_the_end, {}, FailureKind.HANGS, Case(())),
    (w.brackets, {"idempotent": True}, FailureKind.IDEMPOTENT, EMPTY),
    (
        w.counts,
        {"order_free": True},
        FailureKind.ORDER_FREE,
        Case((Step((b"",)), Step((b"x",)))),
    ),
    (
        w.writes_python,
        {"as_json": True, "json_out": True},
        FailureKind.JSON,
        Case((Step((b"null",)),)),
    ),
    (
        w.forgets_x,
        {"model": f"{__name__}:upper"},
        FailureKind.MODEL,
        Case((Step((b"x",)),)),
    ),
]


def upper(message: bytes) -> list[bytes]:
    """Do what the worker should do."""
    return [message.upper()]


def search(
    script: Script,
    *,
    examples: int = 150,
    known: Iterable[CaseFailed] = (),
    **settings: Any,  # noqa: ANN401 - of fuzzer_of()
) -> list[Found]:
    """Return the failures that are found in a script."""
    return searched(fuzzer_of(script, **settings), examples, known=known)


def fuzzer_of(
    script: Script,
    *,
    mode: Mode = Mode.SINGLE,
    markers: Markers | None = None,
    as_json: bool = False,
    expect: ReplyContract | None = None,
    **oracles: Any,  # noqa: ANN401
) -> Fuzzer:
    """Return a fuzzer for a script."""
    promises = expect or ReplyContract()
    dialect = MarkerDialect(mode=mode, markers=markers or Markers())
    return Fuzzer(
        Stage(name="w", worker=("no-such-program",), dialect=dialect, expect=promises),
        cases(dialect, drawn=json_messages if as_json else messages),
        Oracles(**oracles),
        size=0 if mode is Mode.SINGLE else 3,
        as_json=as_json,
        given=large_cases(dialect, as_json=as_json),
        launch=ScriptedLaunch(script),
    )


@pytest.mark.parametrize(
    ("script", "told", "kind", "shortest"),
    PLANTED,
    ids=[f"{number}-{bug[2].label}" for number, bug in enumerate(PLANTED)],
)
def test_bug_is_found(
    script: Script, told: dict[str, Any], kind: FailureKind, shortest: Case
) -> None:
    """It is shrunk to its known minimum, which fails from a fresh start (issue 12)."""
    found = search(script, **told)[0]
    assert (found.failure.kind, found.steady) == (kind, True)
    assert found.case == shortest


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (w.echo, {"one_output": True, "stateless": True, "idempotent": True}),
        (w.echo, {"order_free": True, "markers": CRLF}),
        (w.echo_batches, {**BATCH, "one_output": True}),
    ],
)
def test_sound_worker_passes(script: Script, told: dict[str, Any]) -> None:
    """Nothing is found where nothing is (issue 12)."""
    assert search(script, examples=20, **told) == []


@pytest.mark.parametrize(
    ("markers", "told", "message"),
    [
        (Markers(eom=b"x"), {}, b"\x80"),
        (Markers(eom=b'"'), {"as_json": True}, b"null"),
    ],
)
def test_bug_is_shrunk_to_what_may_be_sent(
    markers: Markers, told: dict[str, Any], message: bytes
) -> None:
    """No message is tried that its own markers forbid (issue 26)."""
    script = w.takes_numbers if told else w.takes_ascii
    (found,) = search(script, markers=markers, **told)
    assert (found.failure.kind, found.steady) == (FailureKind.CRASHES, True)
    assert found.case == Case((Step((message,)),), markers)


@pytest.mark.parametrize(
    ("markers", "as_json", "messages"),
    [
        (Markers(), False, {b"x" * 65537, b"x" * 1048576}),
        (Markers(eom=b"x"), False, {b"-" * 65537, b"-" * 1048576}),
        (Markers(b"x", b"-", b"0", b" "), False, set()),
        (Markers(eom=b'"'), True, set()),
    ],
)
def test_large_messages_may_be_sent(
    markers: Markers, as_json: bool, messages: set[bytes]
) -> None:
    """They are made of a byte that is not in a marker, if there is any (issue 26)."""
    large = large_cases(MarkerDialect(markers=markers), as_json=as_json)
    found = {m for case in large for step in case.steps for m in step.messages}
    assert found == messages


def test_two_bugs_are_two() -> None:
    """The search goes on after the first (issue 26)."""
    found = search(w.each(w.has_two_bugs))
    assert {one.failure.kind for one in found} == {
        FailureKind.CRASHES,
        FailureKind.BREAKS,
    }
    cases = sorted(one.case.steps[0].messages[0] for one in found)
    assert cases == [b"yy", b"\x80"]
    assert all(one.case.count == 1 for one in found)


def test_bug_that_is_known_is_not_reported_again() -> None:
    """The search goes on after failures that were kept, too (issue 26)."""
    (first, second) = search(w.each(w.has_two_bugs))
    (other,) = search(w.each(w.has_two_bugs), known=[first.failure])
    assert other.failure.signature == second.failure.signature


def test_large_messages_are_drawn() -> None:
    """They are larger than a pipe's buffer, and are shown in few words (issue 26)."""
    (found,) = search(w.each(w.reads_a_pipe_full))
    assert found.case == Case((Step((b"x" * 65537,)),))
    assert repr(found.case) == "Case([Step([b'x' * 65537])])"
    (line, _) = found.case.written(MarkerDialect())
    assert len(line) < 300


def test_what_was_not_asked_is_reported() -> None:
    """So is the number of refusals (issue 26)."""
    fuzzer = fuzzer_of(w.each(w.refuses), stateless=True)
    assert searched(fuzzer, 20) == []
    refused = f"; refused {fuzzer._bench.refused} of {fuzzer._bench.replies}"
    assert 0 < fuzzer._bench.refused < fuzzer._bench.replies
    assert fuzzer.passed() == (
        "answers, protocol, stateless. Not checked: outputs, JSON, idempotent,"
        f" order-free, model{refused}"
    )


@pytest.mark.parametrize(
    ("script", "contract", "kind", "shortest"),
    [
        (w.keeps_state, ReplyContract(stateless=True), FailureKind.STATELESS, TWICE),
        (w.brackets, ReplyContract(json=True), FailureKind.JSON, EMPTY),
        (w.echo, ReplyContract(outputs=2), FailureKind.EXPECT, EMPTY),
        (w.echo, ReplyContract(where="this != 0"), FailureKind.EXPECT, EMPTY),
    ],
)
def test_what_a_stage_promises_is_a_property(
    script: Script, contract: ReplyContract, kind: FailureKind, shortest: Case
) -> None:
    """No option has to repeat it (issue 26)."""
    (found,) = search(script, expect=contract)
    assert (found.failure.kind, found.case) == (kind, shortest)


def test_what_a_stage_promises_was_asked() -> None:
    """Promises have the names of the pipeline file (issue 26)."""
    contract = ReplyContract(outputs=1, where="true", order_free=True)
    fuzzer = fuzzer_of(w.each(w.refuses), expect=contract)
    assert fuzzer.passed() == (
        "answers, protocol, outputs, order-free, where. Not checked: JSON, idempotent,"
        " stateless, model"
    )


def test_search_that_time_ends_is_reported_as_such() -> None:
    """It must not look as if everything had been tried (issue 26)."""
    fuzzer = fuzzer_of(w.echo)
    with fuzzer.running():
        assert fuzzer.search(Budget(150, seconds=0, seed=1)) == []
    assert (fuzzer.progress.stopped, fuzzer.progress.examples) == (True, 0)


def test_search_that_is_interrupted_has_found_something() -> None:
    """It is the bug that was being shrunk, as short as it was by then (issue 26)."""
    fuzzer = fuzzer_of(w.takes_ascii)

    def tell(done: Progress) -> None:
        if done.tries == 3:
            raise KeyboardInterrupt

    fuzzer.tell = tell
    with pytest.raises(KeyboardInterrupt):
        searched(fuzzer, 150)
    (found,) = fuzzer.found
    assert found.failure.kind is FailureKind.CRASHES
    assert not all(m.isascii() for step in found.case.steps for m in step.messages)


@pytest.mark.parametrize(
    ("kind", "what", "transcript", "signature"),
    [
        (FailureKind.HANGS, "the worker has 1 reply outstanding", "", ()),
        (
            FailureKind.CRASHES,
            "the worker exited with status 1; 1 reply is owed",
            "     0.1  stderr  Traceback (most recent call last):\n"
            + " " * 20
            + "ValueError: b'x'",
            ("status 1", "ValueError"),
        ),
        (FailureKind.CRASHES, "the worker was killed by SIGSEGV", "", ("SIGSEGV",)),
        (
            FailureKind.BREAKS,
            "the worker wrote 12 bytes: b'x'",
            "",
            ("the worker wrote  bytes",),
        ),
        (FailureKind.BREAKS, "the worker wrote 2 replies too many", "", ("surplus",)),
    ],
)
def test_signature_distinguishes_bugs(
    kind: FailureKind, what: str, transcript: str, signature: tuple[str, ...]
) -> None:
    """It does not depend on the messages (issue 26)."""
    assert CaseFailed(kind, what, transcript).signature == (kind, *signature)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"", "b''"),
        (b"x" * 99, repr(b"x" * 99)),
        (b"x" * 100, "b'x' * 100"),
        (b'"' + b"x" * 100 + b'"', """b'"' + b'x' * 100 + b'"'"""),
        (b"\n" * 200 + b"\0" * 100, "b'\\n' * 200 + b'\\x00' * 100"),
    ],
)
def test_long_message_is_written_as_a_product(message: bytes, text: str) -> None:
    """The text is a Python expression for the same bytes (issue 26)."""
    assert literal(message) == text
    assert eval(text) == message  # noqa: S307


def test_case_reads_as_a_program() -> None:
    """The printed program is the same case (issue 12)."""
    case = Case((Step((b"",)), Step((b"x",), (1,)), Step((b"",) * 3)))
    assert eval(repr(case)).to_plain() == case.to_plain()  # noqa: S307
    assert repr(Case((Step((b"",)),) * 9)) == "Case([Step([b''])] * 9)"
    marked = Case((), CRLF)
    assert eval(repr(marked)) == Case([], CRLF)  # noqa: S307
    assert Case.from_plain(marked.to_plain()) == marked


@pytest.mark.process
def test_case_is_verified() -> None:
    """One call verifies a program, with the oracles by name (issue 12)."""
    counting = hostile_worker(FaultPlan(), transform="count")
    with pytest.raises(CaseFailed, match=r"^gave \[b'2'\] for b'', but \[b'1'\] alone"):
        verify(counting, Case([Step([b""])] * 2), stateless=True)
    upper = hostile_worker(FaultPlan(), transform="upper")
    verify(upper, Case([Step([b"x"], cuts=[1])]), idempotent=True)
    plan = FaultPlan.of(Fault(FaultKind.FLOOD, message=3, size=1))
    flooding = hostile_worker(plan, mode=Mode.BATCH_SUPERVISOR)
    with pytest.raises(CaseFailed, match="gave 4 outputs for batch"):
        verify(flooding, Case([Step([b""] * 3)]), batch="supervisor", one_output=True)


def test_json_stays_json_while_it_shrinks() -> None:
    """A worker for JSON must not be blamed for other input (issue 12)."""
    case = Case((Step((b'{"a": [1, {"b": true}]}',)), Step((b"[]",))))
    tried = []

    def fails(candidate: Case) -> bool:
        said = [m for step in candidate.steps for m in step.messages]
        tried.extend(said)
        return any(b"true" in message for message in said)

    assert shorten(case, fails, as_json=True) == Case((Step((b"true",)),))
    for message in tried:
        json.loads(message)
