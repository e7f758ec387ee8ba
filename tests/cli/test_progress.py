from __future__ import annotations

import io

import anyio
import pytest
from rich.console import Console

from etlstage.cli.progress import (
    Rates,
    accounts_table,
    show_lines,
    show_table,
    state_line,
)
from etlstage.messages import StageKind
from etlstage.pipeline.ledger import Account, Ledger


@pytest.fixture
def ledger() -> Ledger:
    """Return the accounts of a pipeline in the middle of a run."""
    load = Account("load", StageKind.LOAD)
    ledger = Ledger.of_pipeline("extract", ["[bold]clean"], load)
    ledger[0].produced = 4000
    ledger[1].received, ledger[1].done, ledger[1].produced = 3000, 2900, 5800
    ledger[1].failed, ledger[1].unprocessed = 2, 1
    ledger[2].received, ledger[2].done, ledger[2].dead = 5000, 1000, 7
    return ledger


class Screen(io.StringIO):
    """Keeps what was written, and lets a test wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._written = anyio.Event()

    def write(self, text: str) -> int:
        """Keep text, and wake the test."""
        count = super().write(text)
        self._written.set()
        return count

    async def shows(self, text: str) -> None:
        """Return once ``text`` has been written."""
        while text not in self.getvalue():
            await self._written.wait()
            self._written = anyio.Event()


def shown(ledger: Ledger, width: int = 80) -> list[list[str]]:
    """Return the words of each line of the table."""
    console = Console(file=io.StringIO(), width=width)
    table = accounts_table(ledger, "seconds", ["1", "2", "3"], width)
    with console.capture() as capture:
        console.print(table, crop=False)
    return [line.split() for line in capture.get().splitlines()]


def test_table_has_a_row_for_each_stage(ledger: Ledger) -> None:
    """A load stage's ``out`` is what is durable; names are not markup."""
    assert shown(ledger) == [
        ["stage", "in", "out", "dead", "failed", "unprocessed", "seconds"],
        ["extract", "-", "4,000", "0", "0", "0", "1"],
        ["[bold]clean", "3,000", "5,800", "0", "2", "1", "2"],
        ["load", "5,000", "1,000", "7", "0", "0", "3"],
    ]


@pytest.mark.parametrize(
    ("width", "name"), [(80, "of months/a very long nam\u2026"), (20, "of m\u2026")]
)
def test_only_names_are_shortened(width: int, name: str) -> None:
    """A name too long for the screen never costs a digit of a count (issue 26)."""
    long = "of months/a very long name/of_words"
    ledger = Ledger.of_pipeline(long, ["clean"], Account("load", StageKind.LOAD))
    ledger[0].produced = ledger[0].failed = 1_234_567
    assert shown(ledger, width)[:2] == [
        ["stage", "in", "out", "dead", "failed", "unprocessed", "seconds"],
        [*name.split(), "-", "1,234,567", "0", "1,234,567", "0", "1"],
    ]


@pytest.mark.parametrize("seldom", ["skipped", "doubtful", "restarts"])
def test_what_is_seldom_has_a_column_where_there_is_any(
    ledger: Ledger, seldom: str
) -> None:
    """Most workers skip nothing; a restart that lost nothing is counted only here."""
    setattr(ledger[1], seldom, 12)
    head, _, clean, load = shown(ledger)
    assert head[-2:] == [seldom, "seconds"]
    assert (clean[-2:], load[-2:]) == (["12", "2"], ["0", "3"])


def test_skipped_messages_are_in_the_line(ledger: Ledger) -> None:
    """Their count is beside that of unprocessed messages (issue 10)."""
    ledger[1].skipped = 12
    assert " unprocessed 1 skipped 12 " in state_line(ledger, 12.3, [800, 1500.4, 0])


def test_line_names_what_went_wrong_only_if_it_did(ledger: Ledger) -> None:
    """A line of zeros hides the one number that matters."""
    assert state_line(ledger, 12.3, [800, 1500.4, 0]) == (
        "12 s: extract out 4,000 (800/s);"
        " [bold]clean in 3,000 out 5,800 failed 2 unprocessed 1 (1,500/s);"
        " load in 5,000 out 1,000 dead 7"
    )


def test_line_before_the_first_message() -> None:
    """Spark takes seconds to start; a row of zeros would look like a hang."""
    ledger = Ledger.of_pipeline("extract", [], Account("load", StageKind.LOAD))
    assert state_line(ledger, 5, [0, 0], "starting Spark") == "5 s: starting Spark"


def test_line_while_a_worker_is_waited_for(ledger: Ledger) -> None:
    """The worker is named after the counts (issue 11)."""
    line = state_line(ledger, 5, [0, 0, 0], "clean-1: 12 s without an answer")
    assert line.startswith("5 s: extract out 4,000; [bold]clean in")
    assert line.endswith("; clean-1: 12 s without an answer")


@pytest.mark.parametrize(
    ("expected", "rate", "left"),
    [
        (None, 500.0, ""),
        (12_903, 500.0, "about 20 s left"),
        (12_903, 0.0, ""),
        (2_903, 500.0, ""),
        (3_000, 500.0, ""),
    ],
)
def test_time_that_is_left(
    ledger: Ledger, expected: int | None, rate: float, left: str
) -> None:
    """It is shown only if the total and the rate are known (issue 11)."""
    ledger.expected = expected
    line = state_line(ledger, 5, [0, rate, 0])
    assert line.endswith(f"; {left}" if left else " dead 7")


def test_states_are_harmless() -> None:
    """A stage's name and what a run waits for don't steer the terminal (issue 26)."""
    ledger = Ledger.of_pipeline("a\x9b", [], Account("load", StageKind.LOAD))
    ledger[0].produced = 1
    assert state_line(ledger, 5, [0, 0], "b\x1b[31m\n") == (
        r"5 s: a\x9b out 1; load in 0 out 0; b\n"
    )


def test_rate_is_taken_over_the_last_seconds(ledger: Ledger) -> None:
    """What was fast a minute ago need not be fast now."""
    rates = Rates(ledger)
    assert rates.sample(100.0) == [0, 0, 0]
    ledger[0].produced += 500
    ledger[1].failed += 60
    ledger[1].dead += 40
    assert rates.sample(101.0) == [500, 100, 0]
    assert rates.sample(101.0) == [500, 100, 0]
    assert rates.sample(110.0) == [0, 0, 0]


async def test_table_renews_itself(ledger: Ledger) -> None:
    """Changed counters are shown without a further call."""
    screen = Screen()
    console = Console(file=screen, force_terminal=True, width=80)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(show_table, ledger, lambda: "clean-1\n sleeps", console)
        await screen.shows("4,000")
        await screen.shows(r"clean-1\n sleeps")
        ledger[0].produced = 7777
        await screen.shows("7,777")
        tasks.cancel_scope.cancel()
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l")


async def test_lines_go_on(ledger: Ledger) -> None:
    """One is written now and then, without escape sequences."""
    screen = Screen()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: show_lines(ledger, str, screen.write, every=0.01))
        await screen.shows("4,000")
        ledger[0].produced = 7777
        await screen.shows("7,777")
        tasks.cancel_scope.cancel()
    assert screen.getvalue().startswith("0 s: extract out 4,000; [bold]clean in")
    assert "\x1b" not in screen.getvalue()
