"""
Finds a worker's markers on the command line, or in the environment.

This does not use argparse: it takes longer to import than all the rest, and the command
line belongs to the worker, so arguments other than markers are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from etlstage.errors import ConfigError
from etlstage.protocol.marker import MARKER_NAMES, Markers, unescape

__all__ = ("find_markers",)

OPTIONS: Final = {
    "-e": "eom",
    "--end-of-message": "eom",
    "-E": "eop",
    "--end-of-process": "eop",
    "--end-of-batch": "eob",
    "--batch-not-complete": "bnc",
    "--end-of-refusal": "err",
}


def find_markers(arguments: Sequence[str], environment: Mapping[str, str]) -> Markers:
    """
    Return the markers; each that is given nowhere has its default.

    ERR has no default: a supervisor that did not give it would not understand it.

    Args:
        arguments: The command line, without the program.
        environment: The environment of the process.

    Raises:
        ConfigError: If a text can't be read, or the combination is refused.

    """
    found: dict[str, bytes] = {}
    for name, source, text in (
        *_in_environment(environment),
        *_in_arguments(arguments),
    ):
        try:
            found[name] = unescape(text)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    err = found.pop("err", b"") or None
    return Markers(err=err, **found)


def _in_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in MARKER_NAMES:
        variable = f"ETLSTAGE_{name.upper()}"
        if variable in environment:
            yield name, variable, environment[variable]


def _in_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return
        option, equals, text = argument.partition("=")
        if option not in OPTIONS or (equals and not option.startswith("--")):
            continue
        if not equals:
            try:
                text = next(rest)
            except StopIteration:
                raise ConfigError(f"argument {option}: expected a marker") from None
        yield OPTIONS[option], f"argument {option}", text
