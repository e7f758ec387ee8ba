"""Dice in place of Hypothesis where a thousand small decisions make an example."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from random import Random
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

__all__ = ("diced",)

Played: TypeAlias = Callable[[Random], None]


def diced(throws: int) -> Callable[[Played], Callable[[], None]]:
    """
    Run a test with dice, so many times for each of 25 seeds.

    To draw a decision costs Hypothesis more than what it decides. It draws the seeds
    alone, and can't shorten what fails: the error has the dice, to be thrown again.
    """

    def decorate(play: Played) -> Callable[[], None]:
        def run(seed: int) -> None:
            for number in range(throws):
                try:
                    play(Random(f"{seed} {number}"))  # noqa: S311
                except Exception as error:
                    error.add_note(f'dice: Random("{seed} {number}")')
                    raise

        update_wrapper(run, play)
        vars(run).pop("__wrapped__")  # it has another signature
        drawn = given(seed=st.integers(0, 2**32 - 1))(run)
        return settings(deadline=None, max_examples=25)(drawn)

    return decorate
