"""
State of one marker session.

Two rules:

1. Everything that decides *what may follow what* lives in this file.
   ``framing.py`` only finds boundaries; ``protocol.py`` only moves bytes.
2. This file does not know which side it runs on. Both sides pass the same tokens
   through the same table; only who is to blame for a refusal differs.

Theory of operation. The page (see the package's docstring) describes two loops, one for
the supervisor S and one for the worker W. What matters on the wire is the order of
seven tokens:

====== ======= ====================================================
token  from    meaning
====== ======= ====================================================
MESSAGE  S     a message and its EOM
EOB      S     end of the batch
END      S     no more input
OUTPUT   W     (part of) a message of a reply
EOP      W     the reply is complete
ERR      W     in place of EOP: the worker rejects
BNC      W     one more message for this batch, please
====== ======= ====================================================

A session has one of five modes, each with its table. Besides the state there is one
counter, ``owed``: how many EOP the worker still has to write. The k-th EOP answers
the k-th exchange, so S may write ahead and pairs by order; the table sees the last
owed EOP as a token of its own, LAST_EOP, because only that one leads back to IDLE.
ERR counts as an EOP, in the table, too.

Where the page and its implementations (PanDAWMS/dkb) differ, the table follows the
implementations:

* one EOP for each EOB, also for an empty batch, which the page does not mention;
* BNC comes after a message, never after EOP as in "General terms", 7: there a BNC
  would ask for the first message of a batch, which S sends unprompted ("batch
  processing", 1). A BNC in IDLE answers nothing;
* no BNC after the message that fills a batch; a worker that writes one all the same
  ("batch processing", 2, to the letter) is in WANTED and may begin its replies there;
* worker-driven batches are lock-step: the answer to BNC is one message or EOB;
* replies may begin before EOB (awk stages do that), but not end.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from etlstage.protocol.base import IdentityEnum

__all__ = (
    "TRANSITIONS",
    "MarkerState",
    "Mode",
    "Token",
    "TokenMachine",
    "TransitionDenied",
)


class Mode(Enum):
    """Which of the page's scenarios a session follows."""

    PLAIN = "plain"
    """E: the worker writes messages until it exits."""
    CYCLIC = "cyclic"
    """E: each message asks for one round of extraction."""
    SINGLE = "single"
    """T and L: one message, one reply."""
    BATCH_WORKER = "worker-driven batch"
    """T and L: the worker asks with BNC until its batch is full."""
    BATCH_SUPERVISOR = "supervisor-driven batch"
    """T and L: the supervisor closes the batch with EOB."""

    @property
    def extracts(self) -> bool:
        """Whether this is a mode of an extract stage."""
        return self in (Mode.PLAIN, Mode.CYCLIC)

    @property
    def batches(self) -> bool:
        """Whether messages are answered a batch at a time."""
        return self in (Mode.BATCH_WORKER, Mode.BATCH_SUPERVISOR)


class MarkerState(IdentityEnum):
    """The state of a session."""

    IDLE = "IDLE"
    """No batch is open, and no EOP is outstanding."""
    FILLING = "FILLING"
    """A batch is open. In a worker-driven one it's the worker's turn."""
    WANTED = "WANTED"
    """The worker asked for more and waits for a message or EOB."""
    BUSY = "BUSY"
    """An EOP of the worker is outstanding."""
    AHEAD = "AHEAD"
    """An EOP of the worker is outstanding, and the next batch is open already."""
    STREAMING = "STREAMING"
    """The worker writes until it exits."""
    ERROR = "ERROR"
    """The peer broke the protocol."""


class Token(IdentityEnum):
    """What may pass between the sides; the value is its name in errors."""

    MESSAGE = "a message"
    EOB = "EOB"
    END = "the end of input"
    OUTPUT = "output"
    EOP = "EOP"
    LAST_EOP = "the last EOP owed"
    ERR = "ERR"
    BNC = "BNC"


_ONE_BY_ONE: Final = {
    (MarkerState.IDLE, Token.MESSAGE): MarkerState.BUSY,
    (MarkerState.BUSY, Token.MESSAGE): MarkerState.BUSY,
    (MarkerState.BUSY, Token.OUTPUT): MarkerState.BUSY,
    (MarkerState.BUSY, Token.EOP): MarkerState.BUSY,
    (MarkerState.BUSY, Token.LAST_EOP): MarkerState.IDLE,
    (MarkerState.IDLE, Token.END): MarkerState.IDLE,
    (MarkerState.BUSY, Token.END): MarkerState.BUSY,
}

TRANSITIONS: Final[Mapping[Mode, Mapping[tuple[MarkerState, Token], MarkerState]]] = {
    Mode.PLAIN: {
        (MarkerState.STREAMING, Token.OUTPUT): MarkerState.STREAMING,
        (MarkerState.STREAMING, Token.END): MarkerState.STREAMING,
    },
    Mode.CYCLIC: _ONE_BY_ONE,
    Mode.SINGLE: _ONE_BY_ONE,
    Mode.BATCH_WORKER: {
        (MarkerState.IDLE, Token.MESSAGE): MarkerState.FILLING,
        (MarkerState.IDLE, Token.EOB): MarkerState.BUSY,
        (MarkerState.FILLING, Token.BNC): MarkerState.WANTED,
        (MarkerState.FILLING, Token.OUTPUT): MarkerState.BUSY,
        # "Until number of read messages is greater then (or equal to) BATCH_SIZE OR
        # EOB": a full batch is answered without an EOB.
        (MarkerState.FILLING, Token.LAST_EOP): MarkerState.IDLE,
        (MarkerState.WANTED, Token.MESSAGE): MarkerState.FILLING,
        (MarkerState.WANTED, Token.EOB): MarkerState.BUSY,
        (MarkerState.WANTED, Token.OUTPUT): MarkerState.BUSY,
        (MarkerState.WANTED, Token.LAST_EOP): MarkerState.IDLE,
        (MarkerState.BUSY, Token.OUTPUT): MarkerState.BUSY,
        (MarkerState.BUSY, Token.LAST_EOP): MarkerState.IDLE,
        (MarkerState.IDLE, Token.END): MarkerState.IDLE,
        (MarkerState.BUSY, Token.END): MarkerState.BUSY,
    },
    Mode.BATCH_SUPERVISOR: {
        (MarkerState.IDLE, Token.MESSAGE): MarkerState.FILLING,
        (MarkerState.IDLE, Token.EOB): MarkerState.BUSY,
        (MarkerState.FILLING, Token.MESSAGE): MarkerState.FILLING,
        (MarkerState.FILLING, Token.EOB): MarkerState.BUSY,
        (MarkerState.FILLING, Token.OUTPUT): MarkerState.FILLING,
        (MarkerState.BUSY, Token.MESSAGE): MarkerState.AHEAD,
        (MarkerState.BUSY, Token.EOB): MarkerState.BUSY,
        (MarkerState.BUSY, Token.OUTPUT): MarkerState.BUSY,
        (MarkerState.BUSY, Token.EOP): MarkerState.BUSY,
        (MarkerState.BUSY, Token.LAST_EOP): MarkerState.IDLE,
        (MarkerState.AHEAD, Token.MESSAGE): MarkerState.AHEAD,
        (MarkerState.AHEAD, Token.EOB): MarkerState.BUSY,
        (MarkerState.AHEAD, Token.OUTPUT): MarkerState.AHEAD,
        (MarkerState.AHEAD, Token.EOP): MarkerState.AHEAD,
        (MarkerState.AHEAD, Token.LAST_EOP): MarkerState.FILLING,
        (MarkerState.IDLE, Token.END): MarkerState.IDLE,
        (MarkerState.BUSY, Token.END): MarkerState.BUSY,
    },
}
"""``{mode: {(state, token): next state}}``; a missing pair is forbidden."""

_OWES: Final[Mapping[Mode, frozenset[tuple[MarkerState, Token]]]] = {
    Mode.PLAIN: frozenset(),
    Mode.CYCLIC: frozenset({(s, Token.MESSAGE) for s in MarkerState}),
    Mode.SINGLE: frozenset({(s, Token.MESSAGE) for s in MarkerState}),
    # A worker may close its batch by itself: its first message asks for an EOP.
    Mode.BATCH_WORKER: frozenset(
        {(MarkerState.IDLE, Token.MESSAGE), (MarkerState.IDLE, Token.EOB)}
    ),
    Mode.BATCH_SUPERVISOR: frozenset({(s, Token.EOB) for s in MarkerState}),
}
"""``{mode: {(state, token)}}``: after which tokens one more EOP is outstanding."""

_FILLING: Final = frozenset(
    {MarkerState.FILLING, MarkerState.WANTED, MarkerState.AHEAD}
)
"""States in which a batch is open."""

_ENDS: Final = frozenset({Token.EOP, Token.ERR})
"""What ends a reply."""

_HINTS: Final[Mapping[tuple[Mode, Token] | tuple[MarkerState, Token], str]] = {
    (Mode.SINGLE, Token.BNC): "the worker fills batches; set dialect.driver: worker",
    (Mode.CYCLIC, Token.BNC): "an extract stage has no batches",
    (Mode.PLAIN, Token.BNC): "an extract stage has no batches",
    (Mode.PLAIN, Token.EOP): "the worker works in cycles; set dialect.mode: cyclic",
    (Mode.BATCH_SUPERVISOR, Token.BNC): (
        "the worker asks for messages itself; set dialect.driver: worker"
    ),
    (Mode.SINGLE, Token.EOB): "there are no batches in single mode",
    (Mode.CYCLIC, Token.EOB): "there are no batches in an extract stage",
    (MarkerState.IDLE, Token.OUTPUT): "no reply is due; diagnostics belong on stderr",
    (MarkerState.IDLE, Token.EOP): "no reply is due",
    (MarkerState.IDLE, Token.BNC): "BNC follows a message, and none was sent",
    (MarkerState.BUSY, Token.BNC): "the batch is closed already",
    (MarkerState.FILLING, Token.EOP): "the batch is not closed yet; EOP follows EOB",
    (MarkerState.FILLING, Token.MESSAGE): "the worker did not ask for one with BNC",
    (MarkerState.BUSY, Token.MESSAGE): "an EOP of the worker is outstanding",
    (MarkerState.FILLING, Token.END): "a batch is open; close it with EOB",
    (MarkerState.WANTED, Token.END): "a batch is open; close it with EOB",
    (MarkerState.AHEAD, Token.END): "a batch is open; close it with EOB",
}


class TransitionDenied(Exception):
    """Raised for a token that the state does not allow; the caller knows the sender."""


class TokenMachine:
    """Follows the tokens of one session."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.state = MarkerState.STREAMING if mode is Mode.PLAIN else MarkerState.IDLE
        self.owed: int = 0
        """Number of EOP that the worker still has to write."""
        self.answered: int = 0
        """Number of EOP that it has written; the next answers exchange answered + 1."""
        self._table = TRANSITIONS[mode]
        self._owes = _OWES[mode]

    def __repr__(self) -> str:
        return f"<TokenMachine {self.mode.value} {self.state.value} owed={self.owed}>"

    @property
    def filling(self) -> bool:
        """Whether a batch is open."""
        return self.state in _FILLING

    @property
    def opened(self) -> int:
        """Number of the exchange that was opened last, counted from 1."""
        # A batch that the supervisor closes is owed only after its EOB.
        ours = self.mode is Mode.BATCH_SUPERVISOR and self.state in _FILLING
        return self.answered + self.owed + ours

    def handle(self, token: Token, count: int = 1) -> None:
        """
        Move on by ``count`` tokens of one kind.

        Raises:
            TransitionDenied: If the state does not allow the token, or not that many;
                nothing has changed then.

        """
        state, owed, asked = self.state, self.owed, token
        answered = self.answered
        if token in _ENDS:
            if count > owed:
                raise self._refusal(token)
            owed -= count
            answered += count
            token = Token.EOP if owed else Token.LAST_EOP
        elif (state, token) in self._owes:
            owed += count
        try:
            state = self._table[state, token]
            # Lock-step allows one message in WANTED and none in the state after it.
            if count > 1 and token is Token.MESSAGE:
                state = self._table[state, token]
        except KeyError:
            raise self._refusal(asked, state) from None
        self.state, self.owed, self.answered = state, owed, answered

    def fail(self) -> None:
        """Enter ERROR, where every token is refused."""
        self.state = MarkerState.ERROR

    def _refusal(
        self, token: Token, state: MarkerState | None = None
    ) -> TransitionDenied:
        state = state or self.state
        kind = Token.EOP if token is Token.ERR else token
        hint = _HINTS.get((self.mode, kind)) or _HINTS.get((state, kind))
        text = f"can't handle {token.value} in state {state.value}"
        return TransitionDenied(f"{text}: {hint}" if hint else text)
