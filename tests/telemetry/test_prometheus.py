from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from etlstage.errors import ConfigError
from etlstage.telemetry import Meter, PrometheusMeter
from etlstage.telemetry.prometheus import CONTENT_TYPE


def parsed(
    meter: PrometheusMeter,
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what the parser reads, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(meter.render())
        for sample in family.samples
    }


def test_text() -> None:
    """Each metric has its help and type; a counter is called as it was asked for."""
    meter = PrometheusMeter()
    seconds = meter.histogram("took_seconds", "How long.", {"a": "x"}, (0.1, 2))
    for value in (0.05, 0.1, 1, 3):
        seconds.observe(value)
    meter.counter("done_total", "What is done.", {"b": "y", "a": "x"}).add(3)
    meter.gauge("level", "Where it is.", {}).add(-0.5)

    assert meter.render().splitlines() == [
        "# HELP took_seconds How long.",
        "# TYPE took_seconds histogram",
        'took_seconds_bucket{a="x",le="0.1"} 2.0',
        'took_seconds_bucket{a="x",le="2.0"} 3.0',
        'took_seconds_bucket{a="x",le="+Inf"} 4.0',
        'took_seconds_count{a="x"} 4.0',
        'took_seconds_sum{a="x"} 4.15',
        "# HELP done_total What is done.",
        "# TYPE done_total counter",
        'done_total{a="x",b="y"} 3.0',
        "# HELP level Where it is.",
        "# TYPE level gauge",
        "level -0.5",
    ]
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    assert repr(meter) == "<PrometheusMeter metrics=3>"


def test_nothing_is_an_empty_text() -> None:
    """A meter that no one has used yet can be scraped; it shares nothing."""
    PrometheusMeter().gauge("level", "", {}).add(1)
    assert PrometheusMeter().render() == ""


def test_registry_of_the_host() -> None:
    """Its own metrics and ours are one text."""
    registry = CollectorRegistry()
    Gauge("mine", "", registry=registry).set(7)
    meter = PrometheusMeter(registry)
    meter.gauge("level", "", {}).add(1)
    assert meter.registry is registry
    seen = parsed(meter)
    assert (seen["mine", frozenset()], seen["level", frozenset()]) == (7, 1)


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


def test_name_in_use_is_refused() -> None:
    """It is refused when the instrument is made, not when the meter is scraped."""
    meter = PrometheusMeter()
    meter.gauge("g", "", {"a": "x"})
    refused: dict[str, Callable[[], object]] = {
        "Duplicated timeseries .*'g'": lambda: meter.histogram("g", "", {}, (1,)),
        "Incorrect label names": lambda: meter.gauge("g", "", {"b": ""}),
        "Duplicated timeseries": lambda: PrometheusMeter(meter.registry).gauge(
            "g", "", {}
        ),
    }
    for text, attempt in refused.items():
        with pytest.raises(ValueError, match=text):
            attempt()


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the remedy."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'etlstage\[prometheus\]'"):
        PrometheusMeter()


@pytest.mark.process
def test_import_is_lazy() -> None:
    """A program without a meter does not wait for the library."""
    code = (
        "import sys, etlstage.telemetry; print('prometheus_client' in sys.modules,"
        " etlstage.telemetry.PrometheusMeter() and 'prometheus_client' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False True\n"


def test_it_is_a_meter() -> None:
    """It fits the protocol, which mypy checks here."""
    meter: Meter = PrometheusMeter()
    assert meter
