"""
Proves that a worker's replies belong to the exchanges that they are counted for.

The k-th EOP answers the k-th exchange: a worker that writes one too many or too few
shifts all replies that follow, and nothing in the bytes shows it. So replies are held
back until they are proven to add up. This file has the states of such a proof as a
table. ``blocks.py`` decides how much is held back and how long a pause may be,
``reader.py`` which bytes are a reply, and ``state.py`` what may follow what on the
wire; ``protocol.py`` moves bytes and calls all of them.

Theory of operation. When no reply is outstanding, the worker may still have more to
write: a reply too many can be a moment late. But a worker returns to reading only after
it has written everything it had to write. So one byte of the next message is written in
advance (a *probe*, never the byte that completes the message). Once the worker has read
that byte, everything it wrote before is in the pipe. If the pipe holds nothing more,
the block is proven. Three facts come from outside, each by a method:

- ``input_unread(left, now)``: how many bytes of its input the worker has not read. Call
  it while ``wants_unread``. If it returns True, receive everything that the worker has
  written *now*, then call ``output_dry(now)``. The order matters: only what is received
  after the measurement is sure to include everything written before it.
- ``output_dry(now)``: all output was received; this gives the verdict.
- ``peer_exited(clean, now)``: how the process ended, after a last ``input_unread``.

If no message is waiting, the worker must be quiet for a time that follows its own pace.
A lone message, for which a caller waits, is released at once if the process has passed
its first blocks; should a fault show later, that message is *doubtful*. A proof also
precedes the first message of a process: output that it wrote before would be taken for
the beginning of its first reply.

Three rules apply to a worker that is gone. It can't have answered what it has not read.
Unless its exit is clean, its last exchange may have killed it after two replies to the
first: then a lone exchange is released if everything before it was proven, several are
not. And ``unproven`` messages are doubtful if nothing else explains its end, which only
a caller that knows how it ended can decide.

A fault can't be traced to one exchange: no reply that is held back counts. Input that a
thread of the worker reads ahead defeats the probe; only the quiet time helps there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from etlstage.messages import counted
from etlstage.protocol.base import IdentityEnum
from etlstage.protocol.events import Ended, Event, Mispaired
from etlstage.protocol.marker.blocks import LONGEST_QUIET, BlockSizing, Terms
from etlstage.protocol.marker.markers import Markers

__all__ = ("TRANSITIONS", "Proof", "ProofStep", "Stand")

_SHOWN: Final = 64  # bytes of the worker's output shown in an error
# Looks without a pause: timers round up to a millisecond; most workers are faster.
_LOOKS: Final = 40
# Then the seconds between looks, at least and at most: an eighth of the time so far.
_PAUSES: Final = (0.001, 0.25)
_EIGHTH: Final = 0.125
# Seconds to wait for a greeting if no probe is possible: the first message is empty.
_GREETING: Final = 0.1
_AHEAD: Final = 2 * 1024 * 1024  # bytes of messages that may be unanswered


class Stand(IdentityEnum):
    """The state of the proof of a block."""

    OPEN = "OPEN"
    """Exchanges are given and answered; the answers are held back."""
    QUIET = "QUIET"
    """The block has ended: no reply is outstanding, and the worker must be quiet."""
    PROBED = "PROBED"
    """The first byte of what comes next was written in advance."""
    DRAINING = "DRAINING"
    """The worker waits for input: what it has written is being received."""
    OVER = "OVER"
    """The replies do not add up, or the worker is gone."""


class ProofStep(IdentityEnum):
    """An event that changes the state of a proof."""

    END = "end of a block"
    PROBE = "probe"
    SHOWN = "sign of waiting"
    RELEASE = "release"
    STOP = "end of input"
    GIVE_UP = "fault"


TRANSITIONS: Final[dict[tuple[Stand, ProofStep], Stand]] = {
    (Stand.OPEN, ProofStep.END): Stand.QUIET,
    (Stand.QUIET, ProofStep.PROBE): Stand.PROBED,
    (Stand.QUIET, ProofStep.SHOWN): Stand.DRAINING,
    (Stand.PROBED, ProofStep.SHOWN): Stand.DRAINING,
    # Too many bytes wait, or the block is a lone message.
    (Stand.OPEN, ProofStep.RELEASE): Stand.OPEN,
    (Stand.QUIET, ProofStep.RELEASE): Stand.OPEN,
    (Stand.DRAINING, ProofStep.RELEASE): Stand.OPEN,
    **{
        (stand, ProofStep.STOP): Stand.OPEN
        for stand in Stand
        if stand is not Stand.OVER
    },
    (Stand.OVER, ProofStep.STOP): Stand.OVER,
    **{(stand, ProofStep.GIVE_UP): Stand.OVER for stand in Stand},
}
"""``{(stand, step): next stand}``; a missing pair is a bug in etlstage."""
_PROVING: Final = frozenset({Stand.QUIET, Stand.PROBED, Stand.DRAINING})


class Proof:
    """
    Holds back the replies of one worker until they are proven.

    Args:
        terms: The terms of the stage.
        markers: The markers of its dialect.
        out: The list that takes the bytes for the worker.
        batches: Whether exchanges are batches.
        asks: Whether the worker asks for each message of a batch: then it has read what
            it answers. One that counts messages answers before it has read EOB.
        slack: Bytes after EOB that a worker need not read.
        hint: Appended to the error for unsolicited output.

    The argument ``owed`` of methods is the number of exchanges that are not answered.

    Attributes:
        stand: The current state.
        proving: Whether a block is being proven.
        blocks: Decides how much is held back.
        held: Number of answered exchanges that are held back.
        ahead: Whether the worker lacks a part of what it was given last.
        released: Events that were released and have not been fetched.

    """

    def __init__(
        self,
        terms: Terms,
        markers: Markers,
        out: list[bytes],
        *,
        batches: bool = False,
        asks: bool = False,
        slack: int = 0,
        hint: str = "",
    ) -> None:
        self.stand: Stand = Stand.OPEN
        self.proving: bool = False
        self.blocks: BlockSizing = BlockSizing(terms)
        self.held: int = 0
        self.ahead: bool = False
        self.released: list[Event] = []
        self._terms = terms
        self._markers = markers
        self._batches = batches
        self._counts = batches and not asks
        self._slack = slack
        self._hint = hint
        self._answers: list[Ended] = []  # held back
        self._sizes: deque[int] = deque()  # messages of each unanswered batch
        self._held = 0  # messages in the exchanges that are held back
        self._out = out
        self._rest: list[bytes] = []  # what comes next, to be written after the proof
        self._probed = False  # the first byte of the rest was written
        self._checked = False  # the unread bytes were looked at since the block ended
        self._stray = b""  # output when no reply was due, as much as an error shows
        self._heard = b""  # the end of that output: a marker may be cut
        self._ends = False  # a message or reply ends in that output
        self._left = 0  # unread bytes, at the last look
        self._looks = 0
        self._since = self._quiet_until = 0.0
        self._patient = False  # the quiet time is long enough to prove the block
        self._suspect = False  # the last answer may be a second one to a batch before
        self._by_silence = 0  # messages proven by nothing but a quiet time
        self._unproven = 0  # released messages for which a fault may still show
        self._whole: bool | None = None  # all was answered when the output ended
        self._stopped = False
        self._owed_bytes = 0  # of unanswered messages, by the share of exchanges

    @property
    def unproven(self) -> int:
        """Number of released messages whose replies are not yet proven to be theirs."""
        # Output right after a quiet time shows that it was too short. A fault after an
        # answer in the next block does not: the quiet time was before that block.
        return self._unproven + (0 if self.held else self._by_silence)

    # --- what goes to the worker ----------------------------------------------

    def room(self, now: float) -> int:
        """Return how many messages may be given now."""
        if self.stand is Stand.OVER or self.ahead or self._whole is not None:
            return 0
        if self.proving and (self._terms.loads or self.stand is not Stand.QUIET):
            return 0
        return 0 if self._owed_bytes >= _AHEAD else self.blocks.room(now)

    def give(
        self, wire: bytes, messages: int, now: float, *, idle: bool, opens: bool
    ) -> None:
        """
        Take the bytes to write for messages, or for the end of a batch.

        ``messages`` is how many there are in ``wire``. ``idle``: the worker owed
        nothing before. ``opens``: new exchanges begin, else the open batch continues.
        """
        self._owed_bytes += len(wire)
        if self._batches and opens:
            self._sizes.append(messages)
        elif self._batches:
            self._sizes[-1] += messages
        fresh = messages and not self.blocks.total and not self._stopped
        if messages:
            self.blocks.give(messages, len(wire), now)
        if idle:
            self._clear(now)
        if fresh and idle:  # else a reply may come
            self._begin(now)
            self._quiet_until, self._patient = now + _GREETING, True
            self._checked = True  # there was nothing to read
        if not wire:
            return  # the end of a batch that the worker closes itself
        if not self.proving:
            self._out.append(wire)
            return
        self._rest.append(wire)
        self.ahead = True
        if self._checked and self.stand is Stand.QUIET:
            self._probe()

    def stop(self) -> None:
        """Prove nothing more, as the worker's input ends; write all it was given."""
        self._stopped = True
        self._move(ProofStep.STOP)
        self._write_rest()

    # --- what comes from the worker -------------------------------------------

    def hold(
        self,
        answer: Ended,
        size: int,
        now: float,
        *,
        owed: int,
        suspect: bool = False,
    ) -> None:
        """
        Hold back the answer to the oldest exchanges, which takes ``size`` bytes.

        A ``suspect`` answer may be a reply too many, after which the worker may omit
        one, so the block ends with it. Without a probe, it takes the longest quiet
        time to show that it is in order.
        """
        self._suspect = suspect
        count = len(answer.groups)
        self._owed_bytes = self._owed_bytes * owed // (owed + count)
        self.held += count
        if self._batches:
            count = sum(self._sizes.popleft() for _ in range(count))
        self._held += count
        self._answers.append(answer)
        if self.blocks.answered(size, now):
            self._release(proven=False)
        elif not (owed or self._stopped) and (suspect or not self.blocks.room(now)):
            self._end(now)  # so that what comes next can be given as a probe

    def hear(self, data: bytes, events: Sequence[Event]) -> None:
        """Take the worker's output, and its events, while a block is being proven."""
        self._stray = (self._stray + data)[:_SHOWN]
        eom, eop = self._markers.eom, self._markers.eop
        heard = self._heard + data
        self._ends = self._ends or eom in heard or eop in heard
        self._heard = heard[max(0, len(heard) - max(len(eom), len(eop)) + 1) :]
        if events and self.stand is not Stand.OVER:
            self.doubt(self.unsolicited(self._stray))

    def unsolicited(self, data: bytes) -> str:
        """Return the error for a worker that wrote ``data`` when no reply was due."""
        return self._markers.unsolicited(data) + self._hint

    def doubt(self, what: str) -> None:
        """Give up the block: its replies do not add up."""
        doubtful = self.unproven
        if self._terms.loads:
            doubtful += self._held
        self._move(ProofStep.GIVE_UP)
        self.released.append(Mispaired(what, self.held, doubtful))

    # --- the three facts --------------------------------------------------------

    def wants_unread(self, owed: int) -> bool:
        """Return whether it matters how much of its input the worker has read."""
        if self._stopped or self._whole is not None:
            return False
        idle = self.stand is Stand.OPEN and not owed and self.blocks.given > 0
        return idle or self.stand in (Stand.QUIET, Stand.PROBED)

    def input_unread(self, left: int, now: float, *, owed: int) -> bool:
        """Take how much is unread; return whether to receive all output now."""
        self._left = left
        if not self.wants_unread(owed):
            return False
        if self.stand is Stand.OPEN:
            self._end(now)  # there was room, and nothing was given
        if not self._checked:
            self._checked = True
            if left > self._slack and not self._counts:
                self.doubt(
                    f"wrote a reply too many: {counted(left, 'byte')} of what it"
                    " answered unread"
                )
                return False
        if self.stand is Stand.QUIET and self._probe():
            return False
        self._looks += 1
        if self.stand is Stand.PROBED:
            if left and self._stray and not self._slack:
                self.doubt(self.unsolicited(self._stray))
            if left:
                return False
        elif now < self._quiet_until:
            return False
        elif self._quiet_until == self._since and not (left or self.ahead):
            self._release(proven=False)  # a lone message: a caller waits for it
            return False
        self._move(ProofStep.SHOWN)
        return True

    def output_dry(self, now: float) -> None:
        """Judge the block: everything that the worker had written was received."""
        if self.stand is not Stand.DRAINING:
            return  # the output has shown the fault already
        if self._ends:
            self.doubt(self.unsolicited(self._stray))
        elif self._left > self._slack and not self._probed:
            self.doubt(
                "answered a batch before it had read its EOB; for a worker that closes"
                " full batches by itself set dialect.eob_after_full: false"
            )
        else:
            by_silence = 0 if self._probed else self._held
            if self.ahead:
                self.blocks.turn(now)
            self._release(proven=self._probed or self._patient)
            self._by_silence = by_silence if self._patient else 0

    def next_look(self, now: float) -> float | None:
        """Return when :meth:`input_unread` is due again, in seconds, or None."""
        if self.stand is Stand.QUIET:
            return self._quiet_until if self._checked else now
        if self.stand is not Stand.PROBED:
            return None
        if self._looks < _LOOKS:
            return now
        shortest, longest = _PAUSES
        return now + min(max(shortest, _EIGHTH * (now - self._since)), longest)

    def receive_eof(self, now: float, *, owed: int) -> None:
        """Take the end of the worker's output."""
        if self.stand is not Stand.OVER:
            self._end_output(now, owed)
            self._conclude(clean=False)  # how it ends is known only at its exit

    def peer_exited(self, now: float, *, clean: bool, owed: int) -> None:
        """Release the replies of a worker that is gone, if they are proven right."""
        if self.stand is Stand.OVER:
            return
        if self._whole is None:
            self._end_output(now, owed)
        unread = self._left - self._probed
        if self._whole and self.held and unread > self._trail:
            rest = counted(unread, "byte")
            self.doubt(f"exited with {rest} of what it answered unread")
            return
        self._conclude(clean=clean)
        if self._whole and self.held > 1:
            what = "exited after replies of which one may be too many and one missing"
            self.released.append(Mispaired(what, self.held, 0))
        self._move(ProofStep.GIVE_UP)

    # --- internals --------------------------------------------------------------

    @property
    def _trail(self) -> int:
        """Bytes at the end of an answered exchange that may be unread."""
        return self._slack + len(self._markers.eob) * self._batches

    def _clear(self, now: float) -> None:
        """Clear all doubts if the worker was idle long enough for a fault to show."""
        if self.blocks.turn(now):
            self._unproven = self._by_silence = 0

    def _end_output(self, now: float, owed: int) -> None:
        # Silence proves nothing once the worker can write no more.
        if not (owed or self.held):
            self._clear(now)
        self._whole = self.proving or not owed

    def _move(self, step: ProofStep) -> None:
        self.stand = TRANSITIONS[self.stand, step]
        self.proving = self.stand in _PROVING

    def _end(self, now: float) -> None:
        self._begin(now)
        self.blocks.end()

    def _begin(self, now: float) -> None:
        """Begin to prove what is held back."""
        self._move(ProofStep.END)
        quiet = self.blocks.quiet(now, several=self.held > 1)
        if self._suspect:
            quiet = LONGEST_QUIET
        self._since, self._quiet_until = now, now + quiet
        self._patient = quiet >= self.blocks.pace
        self._stray, self._heard, self._ends = b"", b"", False
        self._looks, self._checked = 0, False

    def _probe(self) -> bool:
        """Write a byte of what comes next if that proves anything; return whether."""
        if self._terms.loads or not self._rest or self._left > self._slack:
            return False  # a worker that counts its messages has not read EOB
        first = self._rest[0]
        # The byte must not be the end of an empty message.
        if len(first) == 1 or first[:1] in (self._markers.eom, self._markers.eop):
            return False
        self._out.append(first[:1])
        self._rest[0] = first[1:]
        self._probed = True
        self._move(ProofStep.PROBE)
        return True

    def _conclude(self, *, clean: bool) -> None:
        """Release the replies of a worker that can write no more, if all have come."""
        read = self._left - self._probed <= self._trail
        # A reply too many may have come after what was released without proof. But
        # loaded messages that are given again are loaded twice.
        shown = not (self._unproven or self._by_silence)
        lone = self.held == 1 and (self._terms.loads or shown)
        if self._whole and read and (clean or lone):
            self._flush()

    def _release(self, *, proven: bool) -> None:
        self._unproven = 0 if proven else self._unproven + self._held
        self._by_silence = 0
        self._move(ProofStep.RELEASE)
        self._flush()
        self._write_rest()

    def _flush(self) -> None:
        self.released += self._answers if len(self._answers) < 2 else self._joined()
        self._answers, self.held, self._held = [], 0, 0
        self.blocks.release()

    def _joined(self) -> list[Ended]:
        """Return the held answers in fewer parts, where that copies next to nothing."""
        parts: list[Ended] = []
        for part in self._answers:
            if parts and (joined := _join(parts[-1], part)):
                parts[-1] = joined
            else:
                parts.append(part)
        return parts

    def _write_rest(self) -> None:
        self._out.extend(self._rest)
        self._rest, self._probed, self.ahead = [], False, False


def _join(one: Ended, other: Ended) -> Ended | None:
    """Return two answers as one if both are lists; the first must not be used again."""
    groups, more = one.groups, other.groups
    if type(groups) is not list or type(more) is not list:
        return None
    refusals = one.refusals
    if other.refusals:
        place = len(groups)
        later = [r._replace(place=place + r.place) for r in other.refusals]
        refusals = [*refusals, *later]
    groups += more
    return Ended(one.first, groups, refusals, one.overhead + other.overhead)
