"""
Compiles etlstage/_speedups.c while the package is built, if that can be done, and has
the wheel's bill of materials written.

Without a compiler, or Python's headers, the wheel has none of it and is for any machine;
Python does the same, see etlstage/speedups.py.
"""

from __future__ import annotations

import json
import runpy
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension

MODULE = "etlstage/_speedups"


class Compile(BuildHookInterface[Any]):
    """Called by hatchling, before it collects the files of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and call the wheel after the machine that it is for."""
        extension = Extension(
            MODULE.replace("/", "."),
            [f"{MODULE}.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
        command = Distribution({"ext_modules": [extension]}).get_command_obj(
            "build_ext"
        )
        command.inplace = True
        command.ensure_finalized()
        compiled = Path(command.get_ext_fullpath(extension.name))
        compiled.unlink(missing_ok=True)
        with TemporaryDirectory() as folder:
            command.build_lib = command.build_temp = folder
            command.run()
        if compiled.exists():
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["sbom_files"].append(self._write_sbom())

    def _write_sbom(self) -> str:
        """Write what the wheel needs; return where, seen from the project."""
        core = self.metadata.core
        made = runpy.run_path(str(Path(self.root, ".ci", "sbom.py")))
        document = made["bill_of_materials"](
            core.name,
            self.metadata.version,
            core.license_expression,
            core.dependencies,
            core.optional_dependencies,
        )
        path = Path("build", f"{core.name}.cdx.json")
        Path(self.root, path).parent.mkdir(exist_ok=True)
        Path(self.root, path).write_text(json.dumps(document, indent=2) + "\n")
        return str(path)
