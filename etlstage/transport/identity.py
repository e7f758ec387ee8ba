"""Names of users and groups, and what they stand for."""

from __future__ import annotations

import grp
import os
import pwd
from typing import Final, NamedTuple

from etlstage.errors import guess

__all__ = ("Identity", "UnknownIdentity", "look_up")

_MAX_NUMBER: Final = 2**32 - 2
"""The last uid and gid of Linux; the one behind it means "leave it"."""


class Identity(NamedTuple):
    """Who a program runs as; None is as we do."""

    user: int | None = None
    group: int | None = None
    groups: tuple[int, ...] | None = None
    name: str | None = None
    home: str | None = None


class UnknownIdentity(LookupError):
    """Raised if there is no such user or group."""


def look_up(user: str | None, group: str | None) -> Identity:
    """
    Return who is meant, by names or numbers.

    A user brings his own group, unless another one is named, and his own
    supplementary groups. A group alone comes without any: ours may be root's.

    Raises:
        UnknownIdentity: If there is no such user or group.

    """
    gid = None if group is None else _group(group)
    if user is None:
        return Identity(None, gid, None if gid is None else ())
    entry = _user(user)
    if entry is None and gid is None:
        # Ours would stay, which may be root's.
        raise UnknownIdentity(
            f"user {user} has no entry, so no group; name a group, too"
        )
    if entry is None:
        return Identity(_number(user, "user"), gid, ())
    if gid is None:
        gid = entry.pw_gid
    groups = tuple(os.getgrouplist(entry.pw_name, gid))
    return Identity(entry.pw_uid, gid, groups, entry.pw_name, entry.pw_dir)


def _user(name: str) -> pwd.struct_passwd | None:
    try:
        if name.isdecimal():
            return pwd.getpwuid(_number(name, "user"))
        return pwd.getpwnam(name)
    except KeyError:
        if name.isdecimal():
            return None
        close = guess(name, (entry.pw_name for entry in pwd.getpwall()))
        raise UnknownIdentity(f"there is no user {name!r}{close}") from None


def _group(name: str) -> int:
    if name.isdecimal():
        return _number(name, "group")
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        close = guess(name, (entry.gr_name for entry in grp.getgrall()))
        raise UnknownIdentity(f"there is no group {name!r}{close}") from None


def _number(digits: str, what: str) -> int:
    # A number of thousands of digits int() does not even read.
    if len(digits) > len(str(_MAX_NUMBER)) or int(digits) > _MAX_NUMBER:
        shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
        raise UnknownIdentity(
            f"{what} {shown} is beyond the last number, {_MAX_NUMBER}"
        )
    return int(digits)
