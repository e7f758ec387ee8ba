"""
Properties of a worker, for Hypothesis to try: what holds of each of its replies.

For what depends on what came before, see :mod:`etlstage.testing.machine`. It needs the
extra ``testing``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeAlias

import anyio
import hypothesis
from hypothesis import strategies as st

from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.factories import Tested, stage_of
from etlstage.testing.replies import Reply
from etlstage.testing.strategies import batches

__all__ = ("given_worker",)

Test: TypeAlias = Callable[..., None]


def given_worker(
    tested: Tested,
    *,
    messages: st.SearchStrategy[list[bytes]] | None = None,
    settings: hypothesis.settings | None = None,
    timeout: float = 10.0,
    **options: Any,  # noqa: ANN401 - a stage's
) -> Callable[[Test], Test]:
    """
    Have a test run for what a worker replies to messages that Hypothesis draws.

    ::

        @given_worker(["./clean.sh"])
        def test_blanks_are_dropped(messages, replies):
            for message, reply in zip(messages, replies):
                assert reply.outputs == (message.strip(),)

    Each example has a process of its own. Where the stage works in batches, an example
    is a batch, to which there is one reply.

    Args:
        tested: A command, a script or a stage.
        messages: Draws what is sent at once; by default up to five messages, which look
            as much like markers as they may.
        settings: Hypothesis's; by default 50 examples, which may take their time.
        timeout: How long each wait for the worker may take, in seconds.
        options: Of :class:`~etlstage.Stage`.

    Raises:
        WorkerMisbehaved: By the test, if the worker does not keep to the protocol, or
            to what ``expect`` of the stage has for each reply.

    """
    stage, launch = stage_of(tested, **options)
    if messages is None:
        messages = batches(getattr(stage.dialect, "markers", None))
    if settings is None:
        settings = hypothesis.settings(deadline=None, max_examples=50)

    async def ask(asked: Sequence[bytes]) -> list[Reply]:
        async with WorkerUnderTest(stage, launch=launch, timeout=timeout) as worker:
            replies = await worker.exchange(asked)
            worker.examine_contract(replies)
            await worker.close()
        return replies

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):
            raise TypeError(f"{test.__name__} is a coroutine function; use def")

        whole = inspect.signature(test)
        kept = [p for name, p in whole.parameters.items() if name != "replies"]
        signature = whole.replace(parameters=kept)

        @wraps(test)
        def example(*args: object, **others: object) -> None:
            given = signature.bind(*args, **others).arguments
            test(**given, replies=anyio.run(ask, given["messages"]))

        example.__signature__ = signature  # type: ignore[attr-defined]
        return settings(hypothesis.given(messages=messages)(example))

    return decorate
