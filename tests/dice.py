"""A random generator in place of Hypothesis, where an example is many decisions."""

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
    Run a test with a random generator, ``throws`` times for each of 25 seeds.

    Drawing a decision costs Hypothesis more than the decision itself. So it draws only
    the seeds, and can't shorten a failing example: the error shows how to repeat it.
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
