"""What a worker of dialect ``cocaine`` should do beside what any worker should."""

from __future__ import annotations

from typing import Final

from etlstage.testing.check.cocaine.life import (
    accepts_heartbeats_at_any_time,
    announces_itself,
    ends_in_the_middle,
    ends_its_sessions_before_it_terminates,
    ends_with_its_connection,
    exits_when_heartbeats_go_unanswered,
    sends_heartbeats,
    speaks_both_versions,
    terminates_on_request,
)
from etlstage.testing.check.cocaine.sessions import (
    accepts_a_session_that_is_cancelled,
    accepts_a_session_without_chunks,
    accepts_every_byte,
    accepts_headers,
    accepts_more_chunks_than_one,
    accepts_numbers_with_gaps,
    accepts_sessions_that_overlap,
    answers_while_others_wait,
    refuses_an_event_that_it_does_not_know,
    writes_nothing_after_the_end,
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
    Check(sends_heartbeats),
    Check(accepts_heartbeats_at_any_time),
    Check(accepts_every_byte),
    Check(accepts_sessions_that_overlap, when=_several),
    Check(answers_while_others_wait, when=_several),
    Check(accepts_a_session_without_chunks),
    Check(accepts_more_chunks_than_one),
    Check(refuses_an_event_that_it_does_not_know),
    Check(accepts_a_session_that_is_cancelled),
    Check(writes_nothing_after_the_end),
    Check(accepts_numbers_with_gaps),
    Check(accepts_headers),
    Check(speaks_both_versions),
    Check(terminates_on_request),
    Check(ends_its_sessions_before_it_terminates),
    Check(exits_when_heartbeats_go_unanswered),
    Check(ends_with_its_connection),
    Check(ends_in_the_middle),
)
