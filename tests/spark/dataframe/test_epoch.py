from __future__ import annotations

from etlstage.spark.dataframe.epoch import Epoch


def test_messages_keep_their_order_over_runs() -> None:
    """Small runs and big ones make one column."""
    epoch = Epoch()
    runs = [[b"a"], [b"b" * 200_000], [b"%d" % n for n in range(20_000)], [b"", b"\0"]]
    for run in runs:
        epoch.add(run, sum(map(len, run)))
    messages = [message for run in runs for message in run]
    assert epoch.messages == len(messages)
    assert epoch.size == sum(map(len, messages))
    assert epoch.binary().to_pylist() == messages


def test_string_that_is_no_utf8_is_null() -> None:
    """One undecodable message costs none of its neighbours."""
    epoch = Epoch()
    epoch.add(["é".encode(), b"\xff", b"x"], 4)
    assert epoch.strings().to_pylist() == ["é", None, "x"]


def test_empty_epoch_has_empty_columns() -> None:
    """An epoch without messages still is two columns."""
    assert Epoch().binary().to_pylist() == []
    assert Epoch().strings().to_pylist() == []
