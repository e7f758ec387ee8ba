"""Seed after seed, until one fails; and its story."""

from __future__ import annotations

import time
from collections.abc import Iterable

from etlstage.testing.simulate.control import no_garbage
from etlstage.testing.simulate.run import Draw, Simulation

__all__ = ("SimulationFailed", "simulate", "simulate_all")


class SimulationFailed(AssertionError):
    """
    Raised for a seed whose run broke a promise; the text is the story of it.

    Attributes:
        seed: The seed.
        why: What was not as promised.
        story: What happened, in order, each line with its virtual time.

    """

    def __init__(self, seed: int, why: str, story: Iterable[str]) -> None:
        self.seed = seed
        self.why = why
        self.story: tuple[str, ...] = tuple(story)
        super().__init__(f"seed {seed}: {why}\n  " + "\n  ".join(self.story))


def simulate(draw: Draw, seeds: Iterable[int] = range(1000)) -> None:
    """
    Run pipelines in virtual time, one for each seed, and judge each.

    Every message has one outcome, replies are those of their messages, order is kept
    where it was promised, no position is stored before all that it covers is durable,
    and the run is over in time, with no worker left.

    Args:
        draw: Draws what to run. What it is given is the only chance that it may use.
        seeds: Which to run.

    Raises:
        SimulationFailed: For the first seed whose run breaks one of these promises.

    """
    with no_garbage() as collect:
        for seed in seeds:
            why = Simulation(draw, seed).run()
            if why:
                again = Simulation(draw, seed, told=True)
                found = again.run()
                if found != why:
                    again.tell(f"the first time it was: {why}")
                raise SimulationFailed(seed, why, again.story)
            collect()


def simulate_all(draw: Draw, seeds: range) -> tuple[list[str], float]:
    """Return the stories of all seeds that fail, and the processor time of all."""
    began, stories = time.process_time(), list[str]()
    while seeds:
        try:
            simulate(draw, seeds)
        except SimulationFailed as error:
            stories.append(str(error))
            seeds = range(error.seed + 1, seeds.stop)
        else:
            break
    return stories, time.process_time() - began
