"""What the README shows is true: its Python examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_a_python_example_of_the_readme_runs(
    number: int, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(EXAMPLES[number], f"README.md, Python example {number}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_the_readme_names_targets_and_commands_that_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    shown = subprocess.run(
        [str(Path(sys.executable).parent / "tenuto"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    for command in re.findall(r"^tenuto (\w+)", README, re.MULTILINE):
        assert re.search(rf"^  {command} ", shown, re.MULTILINE)
