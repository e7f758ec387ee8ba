"""
Spark's checkpoint of a query that writes into one of our formats.

The checkpoint records which rows a batch has, and Spark does not make it durable, but
our commits are. So after a crash of the machine Spark could plan a committed batch
again with other rows, and these would be taken for loaded. Therefore, before a batch is
committed, the checkpoint is made durable if it is a folder of the driver's machine;
other file systems are relied on to keep what was written.
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
        options: Options of the write; settings of the session do not reach a format.
        name: Name of the format.

    Raises:
        ConfigError: If the location is not among the options.

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
    # A path without a scheme may be on another file system, Spark's default.
    if path is not None and path.is_dir():
        sync_all(path)
        sync_up([path])
