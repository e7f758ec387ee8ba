"""
Spark's checkpoint of a query that writes into a format of ours.

It has which rows a batch has, and Spark does not make it durable. What is committed here
is: so after a crash of the machine Spark could plan a batch anew, with other rows, that
is committed already, and these would be taken for loaded. So before a batch is committed
its checkpoint is made durable, where that is a folder of the driver's machine; of other
file systems it is theirs to keep what was written.
"""

from __future__ import annotations

from collections.abc import Mapping

from etlstage.disk import sync_all, sync_up
from etlstage.errors import ConfigError
from etlstage.settings.units import local_path

__all__ = ("checkpoint_of", "sync_checkpoint")


def checkpoint_of(options: Mapping[str, str], name: str) -> str:
    """
    Return where the checkpoint of a query is.

    Args:
        options: Of the write; from a setting of the session a format gets nothing.
        name: Of the format.

    Raises:
        ConfigError: If it is not among the options.

    """
    location = options.get("checkpointLocation")
    if location is None:
        raise ConfigError(
            f"format {name}: option checkpointLocation is missing: the setting"
            " spark.sql.streaming.checkpointLocation does not reach the format, which"
            " makes the checkpoint durable before it commits a batch"
        )
    return location


def sync_checkpoint(location: str) -> None:
    """Make a checkpoint durable; raises OSError."""
    path = local_path(location)
    # Without a scheme it may be of Spark's default file system, which is another.
    if path is not None and path.is_dir():
        sync_all(path)
        sync_up([path])
