"""Whether replies belong to the exchanges to which they are attributed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from etlstage.errors import LocalProtocolError
from etlstage.protocol.base import SEND_EOF, Side
from etlstage.protocol.events import Added, Ended, Event, Failed, Mispaired, Opened
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode, proof, protocol
from etlstage.protocol.marker.blocks import Terms
from etlstage.protocol.marker.proof import TRANSITIONS, Proof, ProofStep, Stand
from tests.protocol.marker.model import Fault, Plan, draw, live
from tests.protocol.words import BatchEnd, Eof, Messages, tell


class Talk:
    """The supervisor's session, and what it sends."""

    def __init__(
        self,
        mode: Mode = Mode.SINGLE,
        terms: Terms | None = None,
        markers: Markers | None = None,
    ) -> None:
        self.session = MarkerProtocol(
            Side.SUPERVISOR, mode, markers, terms=terms or Terms()
        )
        assert self.session.proof is not None
        self.proof: Proof = self.session.proof

    def give(self, *messages: bytes, now: float = 0.0) -> bytes:
        """Give messages; return the bytes to write."""
        tell(self.session, Messages(list(messages)), now)
        return b"".join(self.session.data_to_send())

    def hear(self, data: bytes, now: float = 0.0) -> list[Event]:
        """Receive bytes from the worker; return the events."""
        self.session.receive_data(data, now)
        return self.session.events_received()

    def look(self, left: int, now: float = 0.0) -> list[Event]:
        """Report the unread bytes, with no further output; return the events."""
        if self.session.input_unread(left, now):
            self.session.output_dry(now)
        return self.session.events_received()

    def grow_up(self) -> None:
        """Have four blocks answered, so that the process is no longer young."""
        for number in range(4):
            self.give(b"x", now=number)
            if not number:
                self.look(0)
            self.hear(b"X\n\0", number)
            self.look(0, number)
            assert len(self.look(0, number + 0.5)) == 1


def replies(events: list[Event]) -> list[tuple[bytes, ...]]:
    """Return the replies that were released."""
    done = [e for e in events if isinstance(e, Ended)]
    assert done == events
    return [tuple(group) for event in done for group in event.groups]


def fault(events: list[Event]) -> Mispaired:
    """Return the one fault that was found."""
    (found,) = events
    assert isinstance(found, Mispaired)
    return found


# --- the model --------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(at, at + 250) for at in range(0, 1000, 250)])
def test_no_wrong_reply_counts(seeds: range) -> None:
    """Whatever the worker does, in any mode; an honest one's are all released."""
    for seed in seeds:
        plan = draw(seed)
        life = live(plan)
        assert life.wrong == 0, plan
        if not plan.fault.kind:
            assert life.mispaired is None, plan
            assert not life.failed, plan
            assert not life.stuck, plan
            assert len(life.released) == len(life.given), plan
        if plan.fault.kind in ("double", "greet"):
            assert life.mispaired or life.failed, plan


DIES: Plan = Plan(count=2, fault=Fault("double_die", 0), eager=True, terms=Terms(2))
"""It reads both messages, and its second reply repeats the first."""
LEAVES: Plan = Plan(
    count=4, fault=Fault("double_die", 0, status=0), eager=True, terms=Terms(4)
)
"""The same, but it exits with status 0, and two replies are outstanding."""


UNTIL_40: Final = [draw(seed) for seed in range(40)]
MUTATIONS: Final = {
    "nothing is proven": (
        """
        if self.blocks.answered(size, now):
            self._release(proven=False)
""",
        """
        self.blocks.answered(size, now)
        if self.stand is Stand.OPEN:
            self._release(proven=True)
""",
        UNTIL_40,
    ),
    "it is judged before all is received that the worker wrote": (
        "        self._move(ProofStep.SHOWN)\n        return True",
        "        self._move(ProofStep.SHOWN)\n        self.output_dry(now)",
        [draw(seed) for seed in range(60)],
    ),
    "any exit is a clean one": (" and (clean or lone):", ":", [DIES]),
    "who exits has answered all": (
        "        if self._whole and read and",
        "        self._whole = True\n        if read and",
        [LEAVES],
    ),
    "there are no quiet times": (
        """
        quiet = self.blocks.quiet(now, several=self.held > 1)
        if self._suspect:
            quiet = LONGEST_QUIET
""",
        "\n        quiet = 0.0\n",
        [draw(2359), draw(3899)],
    ),
    "what is unread at an exit was answered": (
        "return self._slack + len(self._markers.eob) * self._batches",
        "return 1 << 60",
        [draw(seed) for seed in range(175, 185)],
    ),
    "a worker may write what it likes while a block is proven": (
        "        self._stray = (self._stray + data)[:_SHOWN]",
        "        return",
        UNTIL_40,
    ),
    "whole replies only are heard while a block is proven": (
        "        self._stray = (self._stray + data)[:_SHOWN]",
        "        if not events:\n            return",
        UNTIL_40,
    ),
    "a lone message is proven when it is released": (
        "self._unproven = 0 if proven else self._unproven + self._held",
        "self._unproven = 0",
        [draw(1358)],
    ),
    "the first message is given at once": (
        "fresh = messages and not self.blocks.total and not self._stopped",
        "fresh = False",
        UNTIL_40,
    ),
    "a probe is read as soon as it is written": (
        "        self._left = left\n",
        "        self._left = left = left * (self.stand is not Stand.PROBED)\n",
        UNTIL_40,
    ),
    "a batch may end where the worker has asked for more before": (
        "        self._suspect = suspect\n",
        "        self._suspect = suspect = False\n",
        [draw(37), draw(325)],
    ),
}
"""Code of ``proof.py``, what replaces it, and plans that then have wrong replies."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_rule_is_needed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a wrong reply is released; with it, in the same runs, none is."""
    old, new, plans = MUTATIONS[mutation]
    assert [live(plan).wrong for plan in plans] == [0] * len(plans)
    source = Path(proof.__file__).read_text()
    assert source.count(old) == 1
    mutated: dict[str, Any] = {}
    exec(source.replace(old, new), mutated)  # noqa: S102 - our own
    monkeypatch.setattr(protocol, "Proof", mutated["Proof"])
    monkeypatch.setattr(protocol, "Stand", mutated["Stand"])
    wrong = 0
    for plan in plans:
        try:
            wrong += live(plan).wrong
        except (KeyError, LocalProtocolError):
            continue  # it may also leave the state table
        except AssertionError:
            wrong += 1  # the numbers of the exchanges
    assert wrong


# --- the states -------------------------------------------------------------------


def test_table_knows_each_stand() -> None:
    """The end can be reached from each state, and is never left."""
    for stand in Stand:
        assert TRANSITIONS[stand, ProofStep.GIVE_UP] is Stand.OVER
    out = {to for (stand, _), to in TRANSITIONS.items() if stand is Stand.OVER}
    assert out == {Stand.OVER}
    with pytest.raises(KeyError):
        TRANSITIONS[Stand.PROBED, ProofStep.RELEASE]


def test_first_message_is_a_probe() -> None:
    """Output before the worker has read a message is not a reply."""
    talk = Talk()
    assert talk.give(b"ab") == b"a"
    assert talk.session.room == 0
    assert not talk.look(1)
    assert not talk.look(0)
    assert talk.session.data_to_send() == [b"b\n"]

    greets = Talk()
    greets.give(b"ab")
    found = fault(greets.hear(b"hello\n\0"))
    assert re.search("wrote 1 reply too many: hello<EOM><EOP>", found.what)
    assert (found.exchanges, found.doubtful) == (0, 0)
    assert greets.hear(b"more\n\0") == []


def batch_of_one(talk: Talk, now: float = 0.0) -> None:
    """Have a worker that fills its batches answer one message, which EOB ends."""
    talk.give(b"ab", now=now)
    talk.look(0, now)
    talk.hear(b"\5", now)
    tell(talk.session, BatchEnd(), now)
    assert talk.hear(b"AB\n\0", now) == []
    talk.look(0, now)
    assert len(talk.look(0, now + 0.5)) == 1


def test_empty_batch_that_is_a_reply_too_many() -> None:
    """A worker that asked for more after one message does not end a batch there."""
    talk = Talk(Mode.BATCH_WORKER)
    batch_of_one(talk)
    talk.give(b"cd", now=1.0)
    talk.session.data_to_send()
    # The worker has read the message, but its EOP is an extra one of the batch before.
    assert talk.hear(b"\0", 1.0) == []
    assert talk.look(0, 1.0) == talk.look(0, 1.9) == []
    assert fault(talk.hear(b"\5", 1.9)).exchanges == 1


def test_batch_that_a_worker_ends_early() -> None:
    """It may do so: a second of silence shows that the EOP is not an extra one."""
    talk = Talk(Mode.BATCH_WORKER)
    batch_of_one(talk)
    talk.give(b"cd", now=1.0)
    assert talk.hear(b"\0", 1.0) == []
    assert talk.look(0, 1.0) == []
    assert replies(talk.look(0, 2.0)) == [()]


def test_batch_is_read_when_it_is_answered() -> None:
    """A worker that asks for each message must have read the batch that it answers."""
    talk = Talk(Mode.BATCH_WORKER)
    batch_of_one(talk)
    talk.give(b"cd", now=1.0)
    assert talk.hear(b"\0", 1.0) == []
    assert "3 bytes of what it answered unread" in fault(talk.look(3, 1.0)).what


def test_worker_can_not_ask_behind_a_part_of_a_message() -> None:
    """A part that is written in advance is not a message yet."""
    talk = Talk(Mode.BATCH_WORKER)
    batch_of_one(talk)
    talk.give(b"cd", now=1.0)
    talk.hear(b"\0", 1.0)
    talk.give(b"ef", now=1.0)
    assert fault(talk.hear(b"\5", 1.0)).what.startswith("wrote unsolicited output")


def test_greeting_without_end_is_found_when_it_is_dry() -> None:
    """Partial output alone may be an echo of the probe."""
    talk = Talk()
    talk.give(b"ab")
    assert talk.hear(b"a") == []
    assert talk.session.input_unread(0, 0.0)
    assert talk.hear(b"hello\n") == []
    talk.session.output_dry(0.0)
    assert "wrote unsolicited output" in fault(talk.session.events_received()).what


@pytest.mark.parametrize("long", [0, 64, 70_000])
@pytest.mark.parametrize("markers", [None, Markers(eom=b"<EOM>", eop=b"<P>")])
def test_long_greeting_is_found_however_it_is_cut(
    long: int, markers: Markers | None
) -> None:
    """And it is not taken for the beginning of the first reply."""
    eom = b"\n" if markers is None else markers.eom
    for cut in range(1, len(eom) + 1):
        talk = Talk(markers=markers)
        talk.give(b"ab")
        talk.hear(b"h" * long + eom[: cut - 1])
        assert talk.session.input_unread(0, 0.0)
        assert talk.hear(eom[cut - 1 :]) == []
        talk.session.output_dry(0.0)
        assert "wrote unsolicited output" in fault(talk.session.events_received()).what


def test_output_while_the_probe_is_unread_is_a_fault() -> None:
    """The worker can't echo what it has not read."""
    talk = Talk()
    talk.give(b"ab")
    talk.hear(b"a")
    assert fault(talk.look(1)).what.startswith("wrote unsolicited output: a")


def test_empty_first_message_is_preceded_by_a_quiet_time() -> None:
    """Its only byte would complete it, so it can't be a probe."""
    talk = Talk()
    assert talk.give(b"") == b""
    assert not talk.look(0, 0.09)
    assert talk.session.data_to_send() == []
    assert not talk.look(0, 0.1)
    assert talk.session.data_to_send() == [b"\n"]


def test_answer_to_an_empty_batch_is_no_greeting() -> None:
    """If messages are given before it comes (issue 22)."""
    talk = Talk(Mode.BATCH_SUPERVISOR, Terms(first=8))
    talk.session.send(Opened(1, [], each=False))
    talk.session.send(Opened(2, [b"a", b"b"], each=False))
    assert talk.session.data_to_send() == [b"\x17", b"a\nb\n\x17"]
    assert talk.hear(b"\0a\n\0", 0.01) == []
    talk.look(0, 0.01)
    assert replies(talk.look(0, 9.0)) == [(), (b"a",)]


def test_end_that_the_worker_makes_itself_ends_no_input() -> None:
    """An empty write would; also while a block is being proven (issue 22)."""
    for terms in (None, Terms()):
        session = MarkerProtocol(
            Side.SUPERVISOR,
            Mode.BATCH_SUPERVISOR,
            batch=2,
            eob_after_full=False,
            terms=terms,
        )
        session.send(Opened(1, [b"a", b"b"], each=False, ended=False))
        sent = session.data_to_send()
        session.send(Added(1, [], ended=True))
        assert session.data_to_send() == []
        if session.proof is not None:
            session.input_unread(0, 9.0)
            session.output_dry(9.0)
            sent += session.data_to_send()
        assert b"".join(sent) == b"a\nb\n"
        assert SEND_EOF not in sent


def test_block_is_released_when_its_probe_is_read() -> None:
    """The message written in advance is the first of the next block."""
    talk = Talk(terms=Terms(first=2))
    talk.give(b"a", b"b")
    talk.look(0)
    talk.session.data_to_send()
    assert talk.hear(b"A\n\0B\n\0") == []
    assert talk.proof.held == 2
    assert talk.session.room == 8
    # Nothing is written in advance before the unread bytes are known.
    assert talk.give(b"cd") == b""
    assert talk.look(0) == []
    assert talk.session.data_to_send() == [b"c"]
    assert replies(talk.look(0)) == [(b"A",), (b"B",)]
    assert talk.session.data_to_send() == [b"d\n"]


def test_answer_to_what_is_unread_is_one_too_many() -> None:
    """The whole block goes back, and no earlier reply is doubtful."""
    talk = Talk(terms=Terms(first=2))
    talk.give(b"a", b"b")
    talk.look(0)
    talk.hear(b"A\n\0A\n\0")
    found = fault(talk.look(2))
    assert found.what == ("wrote a reply too many: 2 bytes of what it answered unread")
    assert (found.exchanges, found.doubtful) == (2, 0)
    assert not talk.session.wants_unread
    assert talk.session.room == 0


def test_reply_too_many_in_one_read_is_a_fault() -> None:
    """It is reported as mispairing, not as a broken protocol."""
    talk = Talk()
    talk.give(b"a")
    talk.look(0)
    events = talk.hear(b"A\n\0A\n\0")
    assert fault(events).exchanges == 1


def test_broken_reply_is_no_matter_of_pairing() -> None:
    """Although another reply is outstanding."""
    talk = Talk(terms=Terms(first=2))
    talk.give(b"a", b"b")
    talk.look(0)
    (failed,) = talk.hear(b"A\0")
    assert isinstance(failed, Failed)
    talk.session.receive_data(b"A\n\0", 0.0)
    assert talk.session.events_received() == []


def test_lone_message_is_released_at_once_behind_the_first_blocks() -> None:
    """A caller waits for its reply; it becomes doubtful if a fault shows."""
    talk = Talk()
    talk.grow_up()
    talk.give(b"a", now=5.0)
    talk.hear(b"A\n\0", 5.0)
    assert replies(talk.look(0, 5.0)) == [(b"A",)]
    found = fault(talk.hear(b"A\n\0", 5.1))
    assert (found.exchanges, found.doubtful) == (0, 1)


def test_long_pause_clears_of_doubt() -> None:
    """A reply released without proof would have shown a fault by then."""
    talk = Talk()
    talk.grow_up()
    for now in (5.0, 6.5):
        talk.give(b"a", now=now)
        talk.hear(b"A\n\0", now)
        talk.look(0, now)
    assert fault(talk.hear(b"A\n\0", 6.6)).doubtful == 1


def test_pause_is_as_long_as_the_worker_is_slow() -> None:
    """A duplicate may have counted for a message that a slow worker is busy with."""
    talk = Talk()
    talk.grow_up()
    talk.give(b"a", now=5.0)
    talk.hear(b"A\n\0", 8.0)
    talk.look(0, 8.0)
    talk.give(b"b", now=8.0)
    talk.hear(b"A\n\0", 8.0)
    talk.look(0, 8.0)
    talk.give(b"c", now=10.0)
    talk.hear(b"B\n\0", 11.0)
    assert fault(talk.look(2, 11.0)).doubtful == 2


def test_quiet_time_that_was_too_short_is_doubtful() -> None:
    """Until another message was answered."""
    talk = Talk()
    talk.give(b"a")
    talk.look(0)
    talk.hear(b"A\n\0")
    assert talk.look(0) == []
    assert talk.session.get_timer() == 0.005
    assert len(talk.look(0, 0.005)) == 1
    assert fault(talk.hear(b"A\n\0", 0.006)).doubtful == 1


def test_replies_beyond_what_their_consumer_takes_are_released() -> None:
    """Even without proof, to bound memory."""
    talk = Talk(terms=Terms(first=4))
    talk.session.bound_replies(10)
    talk.give(b"a", b"b", b"c")
    talk.look(0)
    assert replies(talk.hear(b"A\n\0")) == [(b"A",)]


def test_load_worker_has_nothing_written_ahead() -> None:
    """And its last exchange becomes doubtful if a fault shows."""
    talk = Talk(terms=Terms(alone=True, loads=True))
    assert talk.give(b"ab") == b""
    assert not talk.look(0, 0.1)
    assert talk.session.data_to_send() == [b"ab\n"]
    assert talk.hear(b"\0", 0.2) == []
    assert talk.session.room == 0
    assert fault(talk.hear(b"\0", 0.2)).doubtful == 1


def test_looks_are_rarer_with_time() -> None:
    """Forty at once; then after an eighth of the elapsed time, up to 0.25 s."""
    talk = Talk()
    assert talk.session.get_timer() is None
    talk.give(b"ab")
    for _ in range(40):
        assert talk.session.get_timer() == 0.0
        talk.look(1)
    assert talk.session.get_timer() == 0.001
    talk.look(1, 0.8)
    assert talk.session.get_timer() == pytest.approx(0.9)
    talk.look(1, 80.0)
    assert talk.session.get_timer() == 80.25
    talk.session.handle_timer(80.25)


def test_block_that_ends_asks_to_be_looked_at() -> None:
    """At once, because unread input then shows an extra reply."""
    talk = Talk()
    talk.give(b"a")
    talk.look(0)
    talk.hear(b"A\n\0", 7.0)
    assert talk.session.get_timer() == 7.0


# --- the end ----------------------------------------------------------------------


def answered(*, count: int, left: int = 0) -> Talk:
    """Return a session with ``count`` answered messages, after one look."""
    talk = Talk(terms=Terms(first=count))
    talk.give(*[b"x"] * count)
    talk.look(0)
    talk.hear(b"X\n\0" * count)
    talk.session.input_unread(left, 0.0)
    return talk


def test_lone_reply_is_released_at_the_end_of_output() -> None:
    """There is no other message that it could belong to."""
    talk = answered(count=1)
    talk.session.receive_eof(0.0)
    assert replies(talk.session.events_received()) == [(b"X",)]
    assert talk.session.room == 0
    talk.session.peer_exited(False, 0.0)
    talk.session.receive_eof(0.0)
    assert talk.proof.stand is Stand.OVER


@pytest.mark.parametrize("eof", [False, True])
def test_several_are_released_at_a_clean_exit(eof: bool) -> None:
    """The worker has written everything it had to write."""
    talk = answered(count=2)
    if eof:
        talk.session.receive_eof(0.0)
        assert talk.session.events_received() == []
    talk.session.peer_exited(True, 0.0)
    assert replies(talk.session.events_received()) == [(b"X",), (b"X",)]
    talk.session.peer_exited(True, 0.0)
    assert talk.session.events_received() == []


def test_lone_reply_behind_a_quiet_time_goes_back_at_any_other_exit() -> None:
    """It may be a second reply to the message before, later than the quiet time."""
    talk = answered(count=1)
    talk.look(0)
    assert len(talk.look(0, 0.005)) == 1
    assert talk.session.unproven == 1
    talk.give(b"y", now=0.006)
    talk.hear(b"X\n\0", 0.007)
    talk.session.receive_eof(0.007)
    talk.session.peer_exited(False, 0.007)
    assert talk.session.events_received() == []


def test_silence_behind_the_end_of_output_clears_of_no_doubt() -> None:
    """A worker that can't write can't show a fault (issue 22)."""
    talk = answered(count=1)
    talk.look(0)
    assert len(talk.look(0, 0.005)) == 1
    talk.session.receive_eof(0.006)
    talk.session.peer_exited(False, 5.0)
    assert talk.session.unproven == 1


def test_several_go_back_at_any_other_exit() -> None:
    """It may have died at the last message, after two replies to the first."""
    talk = answered(count=2)
    talk.session.peer_exited(False, 0.0)
    assert fault(talk.session.events_received()).exchanges == 2


def test_exit_with_a_probe_outstanding_is_that_of_an_idle_one() -> None:
    """Otherwise each process would repeat the same block forever (issue 22)."""
    talk = answered(count=2)
    assert talk.give(b"next").endswith(b"n")
    talk.session.input_unread(1, 0.0)
    talk.session.peer_exited(True, 0.0)
    assert len(replies(talk.session.events_received())) == 2


def test_what_was_not_read_was_not_answered() -> None:
    """However the worker has exited (issue 22)."""
    talk = answered(count=1)
    talk.look(0, 0.005)
    talk.give(b"y", now=0.01)
    talk.hear(b"Y\n\0", 0.01)
    talk.proof._left = 2
    talk.session.peer_exited(True, 0.01)
    assert fault(talk.session.events_received()).what == (
        "exited with 2 bytes of what it answered unread"
    )


def test_all_that_was_given_is_written_before_the_end_of_input() -> None:
    """Even after a probe; then nothing is proven any more."""
    talk = Talk()
    talk.give(b"ab")
    tell(talk.session, Eof(), 0.0)
    assert talk.session.data_to_send() == [b"b\n", SEND_EOF]
    talk.hear(b"AB\n\0")
    assert not talk.session.wants_unread
    assert not talk.session.input_unread(0, 0.0)
    talk.session.peer_exited(True, 0.0)
    assert replies(talk.session.events_received()) == [(b"AB",)]


def test_worker_that_counts_may_leave_the_end_of_its_batch_unread_at_exit() -> None:
    """Only EOB, and only at its exit: a worker that goes on must have read it."""

    def answered_early() -> Talk:
        talk = Talk(Mode.BATCH_SUPERVISOR, terms=Terms(first=3))
        talk.proof.give(b"a\nb\nc\n\x17", 3, 0.0, idle=True, opens=True)
        assert talk.proof.input_unread(0, 0.0, owed=1)
        talk.proof.output_dry(0.0)
        talk.proof.hold(Ended(1, [(b"abc",)]), 1, 0.0, owed=0)
        return talk

    goes_on = answered_early()
    assert not goes_on.proof.input_unread(1, 0.0, owed=0)
    assert goes_on.proof.input_unread(1, 0.005, owed=0)
    goes_on.proof.output_dry(0.005)
    found = fault(goes_on.session.events_received())
    assert "before it had read its EOB" in found.what

    for unread in (0, 1):
        exits = answered_early()
        assert not exits.proof.input_unread(unread, 0.0, owed=0)
        exits.session.peer_exited(True, 0.0)
        assert replies(exits.session.events_received()) == [(b"abc",)]

    exits = answered_early()
    assert not exits.proof.input_unread(2, 0.0, owed=0)
    exits.session.peer_exited(True, 0.0)
    assert "2 bytes of what it answered" in fault(exits.session.events_received()).what


def test_session_without_terms_holds_nothing_back() -> None:
    """As on the worker's side."""
    session = MarkerProtocol(Side.SUPERVISOR, Mode.SINGLE)
    tell(session, Messages([b"a"]))
    session.receive_data(b"A\n\0")
    assert replies(session.events_received()) == [(b"A",)]
    assert not session.wants_unread
    assert not session.input_unread(0, 0.0)
    session.output_dry(0.0)
    session.give_whole()
    session.peer_exited(True, 0.0)
    assert session.get_timer() is None
