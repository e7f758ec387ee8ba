from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from etlstage.telemetry import Meter, PrometheusMeter
from etlstage.telemetry.prometheus import CONTENT_TYPE


def parsed(
    meter: PrometheusMeter,
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what the real parser reads, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(meter.render())
        for sample in family.samples
    }


def test_text() -> None:
    """Sorted by name, each with its help and type, the last line ended."""
    meter = PrometheusMeter()
    seconds = meter.histogram("took_seconds", "How long.", {"a": "x"}, (0.1, 2))
    for value in (0.05, 0.1, 1, 3):
        seconds.observe(value)
    meter.counter("done_total", "What is done.", {"b": "y", "a": "x"}).add(3)
    meter.gauge("level", "Where it is.", {}).add(-0.5)

    assert meter.render() == (
        "# HELP done_total What is done.\n"
        "# TYPE done_total counter\n"
        'done_total{a="x",b="y"} 3\n'
        "# HELP level Where it is.\n"
        "# TYPE level gauge\n"
        "level -0.5\n"
        "# HELP took_seconds How long.\n"
        "# TYPE took_seconds histogram\n"
        'took_seconds_bucket{a="x",le="0.1"} 2\n'
        'took_seconds_bucket{a="x",le="2"} 3\n'
        'took_seconds_bucket{a="x",le="+Inf"} 4\n'
        'took_seconds_sum{a="x"} 4.15\n'
        'took_seconds_count{a="x"} 4\n'
    )
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    assert repr(meter) == "<PrometheusMeter series=3>"


def test_nothing_is_an_empty_text() -> None:
    """A meter that nobody has used yet can be scraped."""
    assert PrometheusMeter().render() == ""


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")),
    st.floats(),
)
def test_parser_reads_what_was_meant(
    label: str, description: str, value: float
) -> None:
    """Whatever a stage is called."""
    meter = PrometheusMeter()
    meter.gauge("g", description, {"stage": label}).add(value)
    # The parser splits lines everywhere where Python does; Prometheus does at \n.
    lines = meter.render().split("\n")
    assert len(lines) == 4
    if len(meter.render().splitlines()) > 3:
        return
    ((key, seen),) = parsed(meter).items()
    assert key == ("g", frozenset({("stage", label)}))
    assert seen == value or (math.isnan(seen) and math.isnan(value))


def test_escapes() -> None:
    """Backslashes, quotes and line ends, where each of them matters."""
    meter = PrometheusMeter()
    meter.gauge("g", 'a\\b\n"c"', {"stage": 'a\\b\n"c"'}).add(1)
    assert meter.render().splitlines() == [
        '# HELP g a\\\\b\\n"c"',
        "# TYPE g gauge",
        'g{stage="a\\\\b\\n\\"c\\""} 1',
    ]
    (family,) = text_string_to_metric_families(meter.render())
    assert family.documentation == 'a\\b\n"c"'
    assert family.samples[0].labels == {"stage": 'a\\b\n"c"'}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1e15, "1000000000000000"),
        (1e300, "1e+300"),
        (0.1, "0.1"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    """Counts are whole; the rest is as Go reads it."""
    meter = PrometheusMeter()
    meter.gauge("g", "", {}).add(value)
    assert meter.render().endswith(f"g {text}\n")


@given(st.lists(st.floats(-10, 10)))
def test_buckets_add_up(values: list[float]) -> None:
    """Each bucket holds what is at most its bound; the last one everything."""
    meter = PrometheusMeter()
    bounds = (-1.0, 0.0, 5.0)
    histogram = meter.histogram("h", "", {}, bounds)
    for value in values:
        histogram.observe(value)
    seen = parsed(meter)

    assert seen["h_count", frozenset()] == len(values)
    assert seen["h_sum", frozenset()] == pytest.approx(sum(values))
    for bound in (*bounds, math.inf):
        le = {"+Inf": math.inf} | {f"{b:.0f}": b for b in bounds}
        (text,) = [name for name, value in le.items() if value == bound]
        count = seen["h_bucket", frozenset({("le", text)})]
        assert count == sum(value <= bound for value in values)


def test_same_series_is_asked_for_again() -> None:
    """Two supervisors of one stage add to one series; another stage has its own."""
    meter = PrometheusMeter()
    for stage, amount in (("a", 1), ("a", 2), ("b", 4)):
        meter.counter("n_total", "", {"stage": stage}).add(amount)
        meter.histogram("h", "", {"stage": stage}, (1,)).observe(amount)
    seen = parsed(meter)
    assert seen["n_total", frozenset({("stage", "a")})] == 3
    assert seen["n_total", frozenset({("stage", "b")})] == 4
    assert seen["h_count", frozenset({("stage", "a")})] == 2


def test_threads_lose_nothing() -> None:
    """Supervisors may run in several threads, and the host scrape in another."""
    meter = PrometheusMeter()

    def work() -> None:
        counter = meter.counter("n_total", "", {})
        histogram = meter.histogram("h", "", {}, (1,))
        for _ in range(2000):
            counter.add(1)
            histogram.observe(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        meter.render()
    seen = parsed(meter)
    assert seen["n_total", frozenset()] == seen["h_count", frozenset()] == 8000


def test_what_the_format_cant_express_is_refused() -> None:
    """When the instrument is made, not when somebody scrapes."""
    meter = PrometheusMeter()
    meter.gauge("g", "", {"a": "x"})
    meter.histogram("h", "", {}, (1, 2))
    refused: dict[str, Callable[[], object]] = {
        "a metric can't be called 'a-b'": lambda: meter.gauge("a-b", "", {}),
        "a label of g can't be called 'a-b'": lambda: meter.gauge("g", "", {"a-b": ""}),
        "a label of g can't be called '__a'": lambda: meter.gauge("g", "", {"__a": ""}),
        "a histogram's label can't be 'le'": lambda: meter.histogram(
            "x", "", {"le": ""}, (1,)
        ),
        "the name of a counter ends in _total, got 'n'": lambda: meter.counter(
            "n", "", {}
        ),
        r"bounds of x are not ascending: \(2, 1\)": lambda: meter.histogram(
            "x", "", {}, (2, 1)
        ),
        "bounds of x are not ascending: .*inf": lambda: meter.histogram(
            "x", "", {}, (2, math.inf)
        ),
        "g is in use already, as gauge of a, not gauge of no label": lambda: (
            meter.gauge("g", "", {})
        ),
        "g is in use already, as gauge of a, not histogram of a with bounds": lambda: (
            meter.histogram("g", "", {"a": ""}, (1,))
        ),
        "h is in use already": lambda: meter.histogram("h", "", {}, (1, 3)),
        "a counter only grows, got -1": lambda: meter.counter("n_total", "", {}).add(
            -1
        ),
    }
    for text, attempt in refused.items():
        with pytest.raises(ValueError, match=text):
            attempt()


def test_it_is_a_meter() -> None:
    """As the protocol says."""
    meter: Meter = PrometheusMeter()
    assert meter
