"""What a worker of dialect ``cocaine`` should do beside what any worker should."""

from __future__ import annotations

from typing import Final

from etlstage.testing.check.cocaine.life import (
    announces_itself,
    beats_again,
    ends_in_the_middle,
    ends_its_sessions_before_it_terminates,
    ends_with_its_connection,
    leaves_when_nobody_answers,
    speaks_both_versions,
    takes_heartbeats_at_any_time,
    terminates_when_it_is_told,
)
from etlstage.testing.check.cocaine.sessions import (
    answers_while_others_wait,
    refuses_an_event_that_it_does_not_know,
    says_nothing_behind_the_end,
    takes_a_session_that_is_cancelled,
    takes_a_session_without_chunks,
    takes_every_byte,
    takes_headers,
    takes_more_chunks_than_one,
    takes_numbers_with_gaps,
    takes_sessions_that_overlap,
)
from etlstage.testing.check.cocaine.talk import dialect_of
from etlstage.testing.check.subject import Subject
from etlstage.testing.check.suite import Check

__all__ = ("CHECKS",)


def _several(subject: Subject) -> str:
    one = dialect_of(subject).concurrency == 1
    return "it is given one session at a time" if one else ""


CHECKS: Final = (
    Check(announces_itself, gate=True),
    Check(beats_again),
    Check(takes_heartbeats_at_any_time),
    Check(takes_every_byte),
    Check(takes_sessions_that_overlap, when=_several),
    Check(answers_while_others_wait, when=_several),
    Check(takes_a_session_without_chunks),
    Check(takes_more_chunks_than_one),
    Check(refuses_an_event_that_it_does_not_know),
    Check(takes_a_session_that_is_cancelled),
    Check(says_nothing_behind_the_end),
    Check(takes_numbers_with_gaps),
    Check(takes_headers),
    Check(speaks_both_versions),
    Check(terminates_when_it_is_told),
    Check(ends_its_sessions_before_it_terminates),
    Check(leaves_when_nobody_answers),
    Check(ends_with_its_connection),
    Check(ends_in_the_middle),
)
