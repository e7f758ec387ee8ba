from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from etlstage.cli.junit import XmlCase, junit, write


def test_characters_that_xml_does_not_have(tmp_path: Path) -> None:
    """They are escaped, and the file can be written and parsed (issue 26)."""
    text = "\x00\t\x0b\n\r\x1f\x85\ud800\udfff\ufffd\ufffe\uffff\U0001f600\U0001fffe<"
    cases = [
        XmlCase(f"failed {text}", 0.1, [(text, text)]),
        XmlCase("skipped", 0.0, skipped=text),
        XmlCase("passed", 0.2, printed=text),
    ]
    path = tmp_path / "j.xml"
    write(path, junit(f"p\udcff{text}.yaml", cases))
    suite = ET.parse(path).getroot()  # noqa: S314 - our own
    shown = "\ufffd\\ufffe\\uffff\U0001f600\U0001fffe<"
    assert suite[0][0].text == (f"\\x00\t\\x0b\n\\r\\x1f\\x85\\ud800\\udfff{shown}")
    assert str(suite.get("name")).startswith("p\\udcff\\x00")
    for element in (suite[0][0], suite[1][0]):
        assert str(element.get("message")).endswith(f"\\ud800\\udfff{shown}")
