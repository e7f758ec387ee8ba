from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.errors import StateUnusable
from etlstage.pipeline.interfaces import Epochs
from etlstage.spark.dataframe.spool import KeptSpool, Spooled

PARTS = [Spooled(0, "0-1.arrow", 4, 0)]


class Start:
    """A start of a load that may be taken over."""

    def __init__(
        self, state: Path, load: str = "ab12", *, number: int = 1, folder: Path
    ) -> None:
        self.lost = False
        epochs = Epochs(load, 0, once=True, check=self.check, start=number)
        self.spool = KeptSpool(state, folder, epochs)

    def check(self) -> None:
        """Raise if another has taken over."""
        if self.lost:
            raise StateUnusable("taken over")

    def kept(self, text: str = "rows") -> KeptSpool:
        """Return the spool, written and moved into place."""
        (self.spool.make() / PARTS[0].file).write_text(text)
        self.spool.keep(PARTS, "ids")
        return self.spool


def names(path: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture(params=["beside", "within"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Give the folder of spools: a separate one, or the state directory."""
    return tmp_path / ("spools" if request.param == "beside" else "state")


def test_spool_is_whole_when_it_is_in_place(tmp_path: Path, folder: Path) -> None:
    """With the digest of its input; once all is loaded nothing is left (issue 14)."""
    state = tmp_path / "state"
    start = Start(state, folder=folder)
    (start.spool.make() / PARTS[0].file).write_text("rows")
    assert start.spool.find() is None
    start.spool.keep(PARTS, "ids")
    again = Start(state, number=2, folder=folder).spool
    assert again.find() == ("ids", PARTS)
    assert (again.path / PARTS[0].file).read_text() == "rows"
    again.remove()
    again.remove()
    assert (names(state), names(folder)) == ([], [])


def test_spool_is_durable(tmp_path: Path, synced: list[Path], folder: Path) -> None:
    """So is its name; a start that finds the spool syncs that, too (issue 14)."""
    start = Start(tmp_path / "state", folder=folder)
    spool = start.kept()
    aside = spool.path.with_name("spool-ab12.1")
    wanted = {aside / PARTS[0].file, aside / "spool.new", aside}
    assert wanted <= {*synced[:-1]}
    assert synced.pop() == folder
    synced.clear()
    assert spool.find()
    assert synced == [folder]


def test_spools_of_other_loads_are_removed(tmp_path: Path, folder: Path) -> None:
    """Complete or not, and also from the folder that was set before (issue 14)."""
    state, before = tmp_path / "state", tmp_path / "before"
    Start(state, "cd34", folder=before).kept()
    Start(state, "ef56", folder=folder).spool.make()
    Start(state, number=1, folder=folder).spool.make()
    Start(state, number=2, folder=folder).kept()
    left = {*names(folder), *names(state)}
    assert (names(before), left) == ([], {"spool-ab12", "spool-ab12.json"})
    (state / "spool-ab12.json").write_text("[")
    Start(state, number=3, folder=folder).spool.make()
    left = {*names(folder), *names(state)}
    assert left == {"spool-ab12.3", "spool-ab12.json"}


def test_pipelines_have_one_folder_for_their_spools(tmp_path: Path) -> None:
    """Neither touches the spool of the other (issue 14)."""
    one, two = (
        Start(tmp_path / name, load, folder=tmp_path / "spools")
        for name, load in (("a", "ab12"), ("b", "cd34"))
    )
    one.kept()
    two.kept()
    one.spool.make()
    assert two.spool.find() == ("ids", PARTS)
    one.kept()
    two.spool.remove()
    assert one.spool.find() == ("ids", PARTS)
    assert names(tmp_path / "spools") == ["spool-ab12"]


def test_starts_of_a_load_spool_apart(tmp_path: Path, folder: Path) -> None:
    """A start that was taken over may still write; that is not read (issue 14)."""
    state = tmp_path / "state"
    old, new = (Start(state, number=number, folder=folder) for number in (1, 2))
    file = old.spool.make() / PARTS[0].file
    with file.open("w") as late:
        old.lost = True
        spool = new.kept("new")
        late.write("old")
    assert (spool.path / PARTS[0].file).read_text() == "new"
    assert not file.parent.exists()


def test_start_that_was_taken_over_keeps_no_spool(tmp_path: Path, folder: Path) -> None:
    """Nor does it remove one (issue 14)."""
    state = tmp_path / "state"
    old, new = (Start(state, number=number, folder=folder) for number in (1, 2))
    aside = old.spool.make()
    old.lost = True
    with pytest.raises(StateUnusable):
        old.spool.keep(PARTS, "ids")
    assert new.spool.find() is None
    new.kept("new")
    aside.mkdir()
    for late in (
        old.spool.make,
        old.spool.remove,
        lambda: old.spool.keep(PARTS, "ids"),
    ):
        with pytest.raises(StateUnusable):
            late()
    assert new.spool.find() == ("ids", PARTS)


def test_first_spool_that_is_in_place_is_read(tmp_path: Path, folder: Path) -> None:
    """The run that was taken over at that moment has read the same (issue 14)."""
    state = tmp_path / "state"
    old, new = (Start(state, number=number, folder=folder) for number in (1, 2))
    new_aside = new.spool.make()
    old_aside = old.spool.make()  # as if it had checked before
    new_aside.mkdir(exist_ok=True)
    (old_aside / PARTS[0].file).write_text("old")
    old.spool.keep(PARTS, "ids")
    new.spool.keep(PARTS, "others")
    assert new.spool.find() == ("ids", PARTS)
    assert "spool-ab12.2" not in names(folder)
