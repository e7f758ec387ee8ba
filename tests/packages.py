"""Other packages that are installed for a test."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, name: str, group: str, **points: str) -> None:
    """Install a package, version 1.0, that has entry points and no modules."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    (info / "METADATA").write_text(about)
    lines = [f"{point} = {value}\n" for point, value in points.items()]
    (info / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")
