from __future__ import annotations

from itertools import product

import pytest

from etlstage.protocol.marker.state import (
    TRANSITIONS,
    MarkerState,
    Mode,
    Token,
    TokenMachine,
    TransitionDenied,
)

EVERYTHING = list(product(Mode, MarkerState, Token))


def session(mode: Mode, *tokens: Token) -> TokenMachine:
    """Return a session after ``tokens``."""
    session = TokenMachine(mode)
    for token in tokens:
        session.handle(token)
    return session


def refusal(session: TokenMachine, token: Token, count: int = 1) -> str:
    """Return why ``token`` is refused; check that the session is unchanged."""
    before = repr(session)
    with pytest.raises(TransitionDenied) as caught:
        session.handle(token, count)
    assert repr(session) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("mode", "extracts", "batches"),
    [
        (Mode.PLAIN, True, False),
        (Mode.CYCLIC, True, False),
        (Mode.SINGLE, False, False),
        (Mode.BATCH_WORKER, False, True),
        (Mode.BATCH_SUPERVISOR, False, True),
    ],
)
def test_mode_knows_its_kind(mode: Mode, extracts: bool, batches: bool) -> None:
    """Extract stages have no batches."""
    assert mode.extracts is extracts
    assert mode.batches is batches


@pytest.mark.parametrize("mode", Mode)
def test_session_begins_idle_unless_the_worker_just_streams(mode: Mode) -> None:
    """Nothing was asked yet; a plain extract stage is not asked at all."""
    begun = TokenMachine(mode)
    assert begun.owed == 0
    assert begun.state is (
        MarkerState.STREAMING if mode is Mode.PLAIN else MarkerState.IDLE
    )


def test_repr_shows_the_fate() -> None:
    """It is what a failed assertion shows."""
    busy = session(Mode.SINGLE, Token.MESSAGE)
    assert repr(busy) == "<TokenMachine single BUSY owed=1>"


@pytest.mark.parametrize(("mode", "state", "token"), EVERYTHING)
def test_token_is_in_the_table_or_refused(
    mode: Mode, state: MarkerState, token: Token
) -> None:
    """In any state, reachable or not."""
    tested = TokenMachine(mode)
    tested.state = state
    last = token is Token.LAST_EOP
    tested.owed = 1 if last else 2
    counts_as = Token.EOP if token is Token.ERR else token
    after = TRANSITIONS[mode].get((state, counts_as))
    if after is None:
        text = refusal(tested, Token.EOP if last else token)
        name = "EOP" if last else token.value
        assert text.startswith(f"can't handle {name} in state {state.value}")
    else:
        tested.handle(Token.EOP if last else token)
        assert tested.state is after
        if token in (Token.EOP, Token.LAST_EOP, Token.ERR):
            assert tested.owed == (0 if last else 1)


@pytest.mark.parametrize("mode", Mode)
def test_every_state_of_the_table_can_be_reached(mode: Mode) -> None:
    """A row that can't be reached would never have been thought through."""
    reached, new = set(), {(TokenMachine(mode).state, 0)}
    while new:
        reached |= new
        found = set()
        for (state, owed), token in product(new, set(Token) - {Token.LAST_EOP}):
            tested = TokenMachine(mode)
            tested.state, tested.owed = state, owed
            try:
                tested.handle(token)
            except TransitionDenied:
                continue
            found.add((tested.state, min(tested.owed, 2)))
        new = found - reached
    used = {
        (state, Token.LAST_EOP if token is Token.EOP and owed == 1 else token)
        for (state, owed), token in product(reached, Token)
        if token is not Token.EOP or owed
    }
    assert {state for state, _ in reached} == {state for state, _ in TRANSITIONS[mode]}
    assert set(TRANSITIONS[mode]) <= used


M, EOB, END, OUT, EOP, BNC = (
    Token.MESSAGE,
    Token.EOB,
    Token.END,
    Token.OUTPUT,
    Token.EOP,
    Token.BNC,
)

STRAY = "output in state IDLE: no reply is due; diagnostics belong on stderr"
FILLS_ITSELF = (
    "BNC in state FILLING: the worker asks for messages itself;"
    " set dialect.driver: worker"
)

REFUSALS = [
    (Mode.PLAIN, [], M, "a message in state STREAMING"),
    (Mode.PLAIN, [], EOB, "EOB in state STREAMING"),
    (
        Mode.PLAIN,
        [],
        EOP,
        "EOP in state STREAMING: the worker works in cycles; set dialect.mode: cyclic",
    ),
    (
        Mode.PLAIN,
        [OUT],
        BNC,
        "BNC in state STREAMING: an extract stage has no batches",
    ),
    (Mode.CYCLIC, [], OUT, STRAY),
    (Mode.CYCLIC, [], EOP, "EOP in state IDLE: no reply is due"),
    (Mode.CYCLIC, [M], BNC, "BNC in state BUSY: an extract stage has no batches"),
    (
        Mode.CYCLIC,
        [],
        EOB,
        "EOB in state IDLE: there are no batches in an extract stage",
    ),
    (Mode.SINGLE, [], OUT, STRAY),
    (Mode.SINGLE, [M, EOP], EOP, "EOP in state IDLE: no reply is due"),
    (
        Mode.SINGLE,
        [M],
        BNC,
        "BNC in state BUSY: the worker fills batches; set dialect.driver: worker",
    ),
    (Mode.SINGLE, [M], EOB, "EOB in state BUSY: there are no batches in single mode"),
    (
        Mode.BATCH_WORKER,
        [],
        BNC,
        "BNC in state IDLE: BNC follows a message, and none was sent",
    ),
    (Mode.BATCH_WORKER, [], OUT, STRAY),
    (Mode.BATCH_WORKER, [], EOP, "EOP in state IDLE: no reply is due"),
    (
        Mode.BATCH_WORKER,
        [M],
        M,
        "a message in state FILLING: the worker did not ask for one with BNC",
    ),
    (Mode.BATCH_WORKER, [M], EOB, "EOB in state FILLING"),
    (
        Mode.BATCH_WORKER,
        [M],
        END,
        "the end of input in state FILLING: a batch is open; close it with EOB",
    ),
    (Mode.BATCH_WORKER, [M, BNC], BNC, "BNC in state WANTED"),
    (
        Mode.BATCH_WORKER,
        [M, BNC],
        END,
        "the end of input in state WANTED: a batch is open; close it with EOB",
    ),
    (
        Mode.BATCH_WORKER,
        [M, OUT],
        BNC,
        "BNC in state BUSY: the batch is closed already",
    ),
    (
        Mode.BATCH_WORKER,
        [EOB],
        M,
        "a message in state BUSY: an EOP of the worker is outstanding",
    ),
    (Mode.BATCH_WORKER, [EOB], EOB, "EOB in state BUSY"),
    (
        Mode.BATCH_SUPERVISOR,
        [M],
        EOP,
        "EOP in state FILLING: the batch is not closed yet; EOP follows EOB",
    ),
    (
        Mode.BATCH_SUPERVISOR,
        [M],
        END,
        "the end of input in state FILLING: a batch is open; close it with EOB",
    ),
    (
        Mode.BATCH_SUPERVISOR,
        [EOB, M],
        END,
        "the end of input in state AHEAD: a batch is open; close it with EOB",
    ),
    (Mode.BATCH_SUPERVISOR, [M], BNC, FILLS_ITSELF),
    (Mode.SINGLE, [], Token.ERR, "ERR in state IDLE: no reply is due"),
    (
        Mode.BATCH_SUPERVISOR,
        [M],
        Token.ERR,
        "ERR in state FILLING: the batch is not closed yet; EOP follows EOB",
    ),
    (Mode.BATCH_SUPERVISOR, [], OUT, STRAY),
]


@pytest.mark.parametrize(("mode", "before", "token", "text"), REFUSALS)
def test_refusal_has_its_reason(
    mode: Mode, before: list[Token], token: Token, text: str
) -> None:
    """It names the token, the state and, where it can be guessed, the remedy."""
    assert refusal(session(mode, *before), token) == f"can't handle {text}"
