"""
A worker with many sessions at once, each in a thread of its own.

``transform`` answers one message, as a stage of a pipeline; ``sum`` adds numbers up
while they come, for a service that keeps a session open.
"""

from __future__ import annotations

from etlstage.worker import cocaine


def transform(request: cocaine.Request, response: cocaine.Response) -> None:
    """Answer a line with its words in reverse order."""
    words = request.read().split()
    if not words:
        raise cocaine.Refuse("it contains no words")
    response.write(b" ".join(reversed(words)))


def add_up(request: cocaine.Request, response: cocaine.Response) -> None:
    """Answer each number with the sum of all up to it."""
    total = 0
    for chunk in request:  # ends with the caller's input; raises if it is cancelled
        try:
            total += int(chunk)
        except ValueError:
            raise cocaine.Refuse(f"{chunk!r} is not a number") from None
        response.write(b"%d" % total)


if __name__ == "__main__":
    cocaine.run({"transform": transform, "sum": add_up})
