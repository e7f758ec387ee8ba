"""Names of users and groups, and what they stand for."""

from __future__ import annotations

import grp
import os
import pwd
from typing import NamedTuple

from etlstage.errors import guess

__all__ = ("Identity", "UnknownIdentity", "look_up")


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
        return Identity(int(user), gid, ())
    if gid is None:
        gid = entry.pw_gid
    groups = tuple(os.getgrouplist(entry.pw_name, gid))
    return Identity(entry.pw_uid, gid, groups, entry.pw_name, entry.pw_dir)


def _user(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        if name.isdecimal():
            return None
        close = guess(name, (entry.pw_name for entry in pwd.getpwall()))
        raise UnknownIdentity(f"there is no user {name!r}{close}") from None


def _group(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        close = guess(name, (entry.gr_name for entry in grp.getgrall()))
        raise UnknownIdentity(f"there is no group {name!r}{close}") from None
