from __future__ import annotations

import grp
import os
import pwd

import pytest

from etlstage.transport.identity import Identity, UnknownIdentity, look_up

US = pwd.getpwuid(os.getuid())
OURS = grp.getgrgid(US.pw_gid)


def test_nobody_named_is_ourselves() -> None:
    """Nothing is changed then."""
    assert look_up(None, None) == Identity()


@pytest.mark.parametrize("user", [US.pw_name, str(US.pw_uid)])
def test_user_brings_his_groups(user: str) -> None:
    """The primary one and the others; by name or number."""
    groups = tuple(os.getgrouplist(US.pw_name, US.pw_gid))

    assert look_up(user, None) == Identity(
        US.pw_uid, US.pw_gid, groups, US.pw_name, US.pw_dir
    )


def test_group_may_be_another_one() -> None:
    """The user's supplementary groups stay his."""
    identity = look_up(US.pw_name, "12345")

    assert identity.group == 12345
    assert identity.groups is not None
    assert 12345 in identity.groups


@pytest.mark.parametrize("group", [OURS.gr_name, str(OURS.gr_gid)])
def test_group_alone(group: str) -> None:
    """By name or number; the user stays, our supplementary groups don't (issue 10)."""
    assert look_up(None, group) == Identity(None, OURS.gr_gid, ())


def test_number_without_an_entry_needs_a_group() -> None:
    """It would have ours, which may be root's."""
    assert look_up("54321", "12345") == Identity(54321, 12345, ())
    with pytest.raises(
        UnknownIdentity, match="user 54321 has no entry, so no group; name"
    ):
        look_up("54321", None)


def test_unknown_names_are_told() -> None:
    """With the one that may be meant (issue 11)."""
    name, group = US.pw_name, OURS.gr_name
    with pytest.raises(UnknownIdentity, match=f"no user '{name}_' .*'{name}'"):
        look_up(f"{name}_", None)
    with pytest.raises(UnknownIdentity, match=f"no group '{group}_' .*'{group}'"):
        look_up(None, f"{group}_")


@pytest.mark.parametrize("digits", [str(2**32 - 1), "9" * 5000])
def test_numbers_beyond_the_last_are_refused(digits: str) -> None:
    """Linux takes one of them for "leave it", and Python does not read the other."""
    with pytest.raises(UnknownIdentity, match=r"^user \d+(\.{3})? is beyond the last"):
        look_up(digits, "0")
    with pytest.raises(UnknownIdentity, match=r"^group \d+(\.{3})? is beyond the last"):
        look_up(None, digits)
