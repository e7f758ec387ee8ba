"""
Runs a worker's function in the caller's process, as a supervisor would see it.

There is no process, no protocol, and nothing is written: each input is answered before
the next, as :class:`~etlstage.worker.answering.Answering` and
:class:`~etlstage.worker.extraction.Extraction` do it, with the same checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.framing import encode_run
from etlstage.worker.function import Function
from etlstage.worker.refusal import Refuse, reason_of

__all__ = ("Rehearsal",)


class Rehearsal:
    """
    Calls a function as a worker would.

    Args:
        f: The user's function.
        kind: What it does: transform, load or extract.
        on_error: What happens to a message for which it raises.
        markers: The markers of the stage.

    """

    def __init__(
        self, f: Callable[..., Any], kind: str, on_error: str, markers: Markers
    ) -> None:
        self._function = Function(f, kind)
        self._call = self._function.load if kind == "load" else f
        self._extracts = kind == "extract"
        # An extraction is never skipped, and refused only by Refuse.
        self._on_error = "exit" if self._extracts else on_error
        self._markers = markers

    def ask(self, asked: Any) -> list[bytes] | Refuse:  # noqa: ANN401 - by its kind
        """Return the outputs, or a refusal with the exception as its cause."""
        self._check(asked)
        try:
            return self._outputs(asked)
        except Exception as error:
            if isinstance(error, Refuse) or self._on_error == "refuse":
                if self._markers.err is None:
                    raise
                refusal = Refuse(reason_of(error, self._markers))
                refusal.__cause__ = error
                return refusal
            if self._on_error != "skip":
                raise
            return []

    def _check(self, asked: object) -> None:
        """Raise for an input that no supervisor would send."""
        if self._extracts:
            if not isinstance(asked, tuple):
                raise TypeError(
                    f"an extraction takes a tuple of arguments, got {asked!r:.80}"
                )
            return
        messages: list[bytes] = []
        for message in asked if isinstance(asked, list) else [asked]:
            if not isinstance(message, bytes):
                kind = type(message).__name__
                raise TypeError(f"expected a message, or a list of them, got {kind}")
            messages.append(message)
        encode_run(messages, self._markers.without_err(), limit=sys.maxsize)

    def _outputs(self, asked: Any) -> list[bytes]:  # noqa: ANN401 - as above
        function = self._function
        one_to_one = self._markers.eop == self._markers.eom
        if asked == [] and not one_to_one:
            return []
        reply = self._call(*asked) if self._extracts else self._call(asked)
        function.check(reply)
        outputs: list[bytes] = []
        for message in reply:
            if not isinstance(message, bytes):
                function.refuse(message)
            outputs.append(message)
            if one_to_one and len(outputs) > 1:
                break  # it may never end
        if one_to_one:
            function.check_only(outputs)
        encode_run(outputs, self._markers, limit=sys.maxsize)
        return outputs
