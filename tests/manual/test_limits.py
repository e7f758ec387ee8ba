"""Each limit that the page ``limits`` lists has a test that runs into it (issue 27)."""

from __future__ import annotations

import re
from typing import Final

from etlstage.config.schema import pipeline_schema
from tests.manual.fences import DOCS, PAGES, ROOT
from tests.reference import schemas
from tests.supervisor.holding import SCENES

PAGE: Final = PAGES[DOCS / "explanation" / "limits.md"]
CASES: Final = {
    "messages sent ahead": "supervisor/test_flow.py::test_bytes_bound_what_is_read_ahead",
    "held back until they are proven": (
        "protocol/marker/test_blocks.py"
        "::test_block_is_bounded_in_bytes_of_messages_and_replies"
    ),
    "an incomplete reply": (
        "protocol/marker/test_reader_limits.py::test_reply_over_the_limit_is_refused"
    ),
    "its stderr": "supervisor/test_diagnostic.py::test_tail_is_bounded_in_bytes",
    "messages read and not passed on": (
        "supervisor/test_memory.py::test_memory_is_bounded[slow_load]"
    ),
    "replies to messages that were sent ahead": (
        "supervisor/test_memory.py::test_memory_is_bounded[one_to_a_million]"
    ),
    "records that no checkpoint covers": (
        "protocol/kcl/test_session.py::test_so_many_bytes_may_be_uncommitted"
    ),
    "one run of messages": "pipeline/test_pipeline.py::test_full_edges_stop_the_source",
    "outputs that the caller has not taken": (
        "supervisor/test_flow.py::test_slow_consumer_stops_the_worker_through_the_pipe"
    ),
    "chunks not yet written": (
        "supervisor/test_session.py::test_caller_that_does_not_read_stops_the_worker"
    ),
    "rows in flight": "spark/dataframe/test_source.py::test_run_is_bounded",
    "a megabyte of a file": "files/test_source.py::test_file_is_read_a_megabyte_at_a_time",
    "one epoch, its rows": "pipeline/test_loading.py::test_epoch_has_so_many_bytes_at_most",
    "one epoch, and a second copy": (
        "spark/dataframe/test_sink.py::test_epoch_is_bounded_in_bytes"
    ),
    "frames of open transactions": (
        "journal/test_run.py::test_open_transaction_is_not_held_in_memory"
    ),
    "runs of an epoch": (
        "pipeline/test_journal.py::test_runs_of_an_epoch_are_held_up_to_a_megabyte"
    ),
    "five of Spark's input batches": "spark/task/test_portal.py::test_what_is_not_taken_is_bounded",
    "the one being written": (
        "pipeline/dead_letter/test_policy.py"
        "::test_what_was_refused_in_one_run_is_written_together"
    ),
}
"""The test that reaches the limit of a row, by words of its second column."""
ROWS: Final = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| where", "| `submit`"))
]
"""All rows but that of ``submit``, which has no limit."""


def test_every_limit_has_a_case() -> None:
    """No case is left for a limit that is gone, either."""
    assert len(ROWS) == len(CASES)
    for _, what, *_ in ROWS:
        assert [part for part in CASES if part in what] != [], what
    for case in CASES.values():
        file, _, name = case.partition("::")
        name, _, scene = name.removesuffix("]").partition("[")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), case
        assert not scene or scene in SCENES


def test_settings_are_keys_that_there_are() -> None:
    """They may also be arguments of a supervisor, or settings of Spark."""
    known = {key for key, _ in schemas(pipeline_schema())}
    parts = {part for key in known for part in key.split(".")}
    for *_, settings in ROWS:
        for name in re.findall(r"`([\w.]+)`", settings):
            if name.startswith("spark.sql.") or name in ("AsyncSupervisor", "kcl"):
                continue
            right = (
                name in known
                if "." in name
                else name
                in parts
                | {
                    "max_messages",
                    "max_bytes",
                }
            )
            assert right, name
