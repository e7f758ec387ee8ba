"""The state tables of all modes, walked at random and compared with a model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from etlstage.protocol.marker.state import (
    MarkerState,
    Mode,
    Token,
    TokenMachine,
    TransitionDenied,
)
from tests.protocol.strategies import moderate


class SessionMachine(RuleBasedStateMachine):
    """
    Plays any tokens against a model that has no states, only answers to questions.

    Is a batch open? How many EOP are owed? Did the worker ask for more?
    """

    mode: Mode

    @initialize(mode=st.sampled_from(Mode))
    def begin(self, mode: Mode) -> None:
        """Begin a session."""
        self.mode = mode
        self.session = TokenMachine(mode)
        self.open = self.asked = False
        self.owed = 0

    def tell(self, token: Token, count: int, *, allowed: bool) -> bool:
        """Handle the token; check that it is allowed exactly if the model does."""
        before = repr(self.session)
        if allowed:
            self.session.handle(token, count)
        else:
            with pytest.raises(TransitionDenied):
                self.session.handle(token, count)
            assert repr(self.session) == before
        return allowed

    @rule(count=st.integers(1, 3))
    def message(self, count: int) -> None:
        """Send a run of messages."""
        if self.mode is Mode.BATCH_WORKER:
            free = self.asked or not self.owed
            if self.tell(Token.MESSAGE, count, allowed=count == 1 and free):
                self.open, self.asked, self.owed = True, False, 1
        elif self.tell(Token.MESSAGE, count, allowed=self.mode is not Mode.PLAIN):
            self.open = self.mode is Mode.BATCH_SUPERVISOR
            self.owed += count * (not self.open)

    @rule()
    def eob(self) -> None:
        """Close a batch, or send an empty one."""
        lock_step = self.mode is Mode.BATCH_WORKER
        free = self.asked or not self.owed or not lock_step
        if self.tell(Token.EOB, 1, allowed=self.mode.batches and free):
            self.open = self.asked = False
            self.owed = 1 if lock_step else self.owed + 1

    @rule()
    def end(self) -> None:
        """End the input."""
        self.tell(Token.END, 1, allowed=not self.open)

    @rule()
    def output(self) -> None:
        """Write a part of a reply."""
        asked_for = self.owed > 0 or self.open or self.mode is Mode.PLAIN
        if (
            self.tell(Token.OUTPUT, 1, allowed=asked_for)
            and self.mode is Mode.BATCH_WORKER
        ):
            self.open = self.asked = False

    @rule(count=st.integers(1, 3))
    def eop(self, count: int) -> None:
        """Complete replies."""
        if self.tell(Token.EOP, count, allowed=count <= self.owed):
            self.owed -= count
            if self.mode is Mode.BATCH_WORKER:
                self.open = self.asked = False

    @rule()
    def bnc(self) -> None:
        """Ask for more."""
        lock_step = self.mode is Mode.BATCH_WORKER
        if self.tell(Token.BNC, 1, allowed=lock_step and self.open and not self.asked):
            self.asked = True

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def agrees(self) -> None:
        """The session's state follows from the model's answers."""
        assert self.session.owed == self.owed >= 0
        if self.mode is Mode.PLAIN:
            expected = MarkerState.STREAMING
        elif self.asked:
            expected = MarkerState.WANTED
        elif self.open and self.owed and self.mode is Mode.BATCH_SUPERVISOR:
            expected = MarkerState.AHEAD
        elif self.open:
            expected = MarkerState.FILLING
        else:
            expected = MarkerState.BUSY if self.owed else MarkerState.IDLE
        assert self.session.state is expected


@pytest.mark.no_cover
def test_any_sequence_of_tokens_goes_as_the_model_has_it() -> None:
    """The state tables of all modes, walked at random."""
    run_state_machine_as_test(SessionMachine, settings=moderate)
