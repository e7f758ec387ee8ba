"""The options of ``etlstage fuzz``."""

from __future__ import annotations

from typing import Annotated

import typer

from etlstage.cli.arguments import (
    Batch,
    Dialect,
    Kind,
    Markers,
    Sample,
    StageName,
    Timeout,
    Words,
)

__all__ = ("fuzzing",)

fuzzing: typer.Typer = typer.Typer(add_completion=False)


@fuzzing.command("fuzz")
def _fuzz(
    words: Words,
    *,
    kind: Kind = None,
    batch: Batch = None,
    markers: Markers = None,
    dialect: Dialect = None,
    stage: StageName = None,
    sample: Sample = None,
    vary_markers: Annotated[
        bool,
        typer.Option(
            "--vary-markers", help="It takes its markers from the environment."
        ),
    ] = False,
    max_examples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Cases that are tried, at most.")
    ] = 300,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="How long is searched, at most.")
    ] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Try the same cases as the run that told this number."
        ),
    ] = None,
    timeout: Timeout = 5.0,
    one_output: Annotated[
        bool,
        typer.Option("--expect-one-output", help="Each message has one output."),
    ] = False,
    json_in: Annotated[
        bool, typer.Option("--json-in", help="It is given only JSON documents.")
    ] = False,
    json_out: Annotated[
        bool, typer.Option("--json-out", help="All that it gives is JSON.")
    ] = False,
    idempotent: Annotated[
        bool,
        typer.Option("--idempotent", help="An output sent again comes back as it is."),
    ] = False,
    order_free: Annotated[
        bool,
        typer.Option(
            "--order-free", help="The order of messages makes no difference to outputs."
        ),
    ] = False,
    stateless: Annotated[
        bool,
        typer.Option(
            "--stateless", help="The messages before make no difference, either."
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="It does as this function in Python."
        ),
    ] = "",
) -> int:
    """
    Look for messages, and cuts of their bytes, that a worker does not stand.

    It must answer, keep to the protocol, and end well; what else must be true, say so.
    Let one that loads do so where it does no harm.
    """
    from etlstage.cli.fuzz import FuzzRequest, fuzz
    from etlstage.cli.subject import Options
    from etlstage.testing.fuzzing.oracle import Oracles

    oracles = Oracles(one_output, json_out, idempotent, order_free, stateless, model)
    options = Options(kind, batch, markers=markers, stage=stage, dialect=dialect)
    wanted = FuzzRequest(options, sample, vary_markers, json_in, timeout, oracles)
    return fuzz(words, wanted, max_examples=max_examples, seconds=seconds, seed=seed)
