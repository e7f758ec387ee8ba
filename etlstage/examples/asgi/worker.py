"""
Answer one request: JSON in, JSON out, each on one line.

As JSON escapes control characters, no message can contain a marker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from etlstage import worker


def answer(message: bytes) -> Iterator[bytes]:
    """Yield the text's length in words and characters; refuse what makes no sense."""
    try:
        text = json.loads(message)["text"]
        reply = {"text": text, "words": len(text.split()), "characters": len(text)}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # The client made a mistake, and gets that answer; we go on.
        wanted = 'expected an object such as {"text": "some words"}'
        raise worker.Refuse(wanted) from error
    yield json.dumps(reply).encode()


if __name__ == "__main__":
    worker.transform(answer)
