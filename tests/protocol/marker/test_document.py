"""Page ``marker-protocol`` describes what the code does."""

from __future__ import annotations

import re
from typing import Final

import pytest

from etlstage.protocol.marker.markers import Markers
from etlstage.protocol.marker.state import Mode, Token, TokenMachine
from etlstage.testing.check import cocaine, extracting, kcl, marker, speaking
from tests.manual.fences import DOCS, FENCES, PAGES

NAME: Final = "reference/marker-protocol.md"
PAGE: Final = PAGES[DOCS / NAME]
DIALOGUES: Final = [f.text.splitlines() for f in FENCES if f.comment == "dialogue"]
MODES: Final = {mode.value: mode for mode in Mode}
PART: Final = re.compile(r"([^<]*)<([A-Z]+)>")


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=[d[0] for d in DIALOGUES])
def test_dialogue_is_allowed(dialogue: list[str]) -> None:
    """From its first byte to its last, with nothing owed at the end (issue 27)."""
    mode, *lines = dialogue
    machine = TokenMachine(MODES[mode])
    for line in lines:
        ours = line.startswith("S: ")
        for content, marker_ in PART.findall(line[3:]):
            if marker_ == "EOM":
                machine.handle(Token.MESSAGE if ours else Token.OUTPUT)
            else:
                assert not content or marker_ == "ERR"
                machine.handle(Token[marker_])
        assert PART.sub("", line[3:]) == ""
    assert machine.owed == 0


def test_every_mode_has_a_dialogue() -> None:
    """And each fence of the page is one of them (issue 27)."""
    assert sorted(mode for mode, *_ in DIALOGUES) == sorted(MODES)
    fenced = [f for f in FENCES if f.section.startswith(NAME)]
    assert len(DIALOGUES) == len(fenced)


def test_markers_have_their_defaults() -> None:
    """The page's first table lists them (issue 27)."""
    shown = re.findall(r"^\| (\w+), .*? \(([0-9a-f]{2})\) \|", PAGE, re.MULTILINE)
    named = {name.upper(): value.hex() for name, value in Markers().named.items()}
    assert dict(shown) == named


def test_every_check_is_tied_to_a_sentence() -> None:
    """And no sentence names a check that does not exist (issue 27)."""
    rows = re.findall(r"^\| ([WS]\d+) \| .* \| (.*?) ?\|$", PAGE, re.MULTILINE)
    told = {name for _, names in rows for name in names.split(", ") if name}
    modules = (speaking, marker, extracting)
    checks = [check for module in modules for check in module.CHECKS]
    # What a stage promises about its replies is not part of the protocol.
    assert told == {check.name for check in checks if not check.promised}


def test_sentences_are_numbered_without_a_gap() -> None:
    """So that each can be cited (issue 27)."""
    for side in "WS":
        numbers = re.findall(rf"^\| {side}(\d+) \|", PAGE, re.MULTILINE)
        assert [int(number) for number in numbers] == [*range(1, len(numbers) + 1)]


OTHERS: Final = {"kcl-protocol": ("K", kcl), "cocaine-protocol": ("C", cocaine)}


@pytest.mark.parametrize("page", OTHERS)
def test_other_dialects_have_their_sentences(page: str) -> None:
    """Numbered without a gap, and each check is tied to one (issue 27)."""
    letter, module = OTHERS[page]
    text = PAGES[DOCS / f"reference/{page}.md"]
    rows = re.findall(rf"^\| {letter}(\d+) \| .* \| (.*?) ?\|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, len(rows) + 1)]
    tied = [name for _, names in rows for name in names.split(", ") if name]
    assert sorted(tied) == sorted(check.name for check in module.CHECKS)
