"""The maintainer's kit does what `make check` and continuous integration do."""

from __future__ import annotations

import os
import re
import tomllib

import pytest

from tests.docs.pages import ROOT


def test_pre_commit_has_the_same_checks_as_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = re.findall(r"^(?:check|docs):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for recipe in recipes for line in recipe.splitlines()]
    hooks = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert len(hooks) == 6
    assert sorted(hooks) == sorted(command.removesuffix(" $(KERNELS)") for command in commands)


def test_the_changelogs_first_release_is_the_version_of_the_project() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    kinds = re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_public_workflow_runs_our_ci_script_on_both_architectures() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"^ +- run: (.+)$", workflow, re.MULTILINE) == [".ci/run"]
    assert "runner: [ubuntu-24.04, ubuntu-24.04-arm]" in workflow
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(("page", "lines"), [("README.md", 200), ("docs/architecture.md", 130)])
def test_the_first_pages_for_newcomers_stay_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines
