"""The allowed imports between packages, as in docs/architecture.md, checked in the source files."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
EVERYTHING = frozenset(
    {
        "base",
        "formats",
        "memory",
        "text",
        "kernels",
        "models",
        "exec",
        "session",
        "sched",
        "engine",
        "runtime",
        "serve",
        "client",
        "api",
        "integrations",
        "cli",
        "ray",
        "demo",
    }
)

MAY_IMPORT: dict[str, frozenset[str]] = {
    "base": frozenset(),
    "memory": frozenset({"base"}),
    "formats": frozenset({"base"}),
    "text": frozenset({"formats", "base"}),
    "kernels": frozenset({"base"}),
    "models": frozenset({"kernels", "formats", "base"}),
    "exec": frozenset({"models", "kernels", "base"}),
    "session": frozenset({"memory", "text", "base"}),
    "sched": frozenset({"session", "memory", "base"}),
    "engine": frozenset({"sched", "session", "memory", "text", "base"}),
    "runtime": EVERYTHING - {"serve", "client", "api", "integrations", "cli", "ray", "demo"},
    "serve": frozenset({"base"}),
    "client": frozenset({"base"}),
    "api": frozenset({"client", "runtime", "text", "base"}),
    "integrations": frozenset({"client", "base"}),
    "cli": EVERYTHING - {"ray"},
    "ray": frozenset({"cli", "serve", "base"}),
    "demo": EVERYTHING - {"ray"},
    "__init__": frozenset({"api", "client"}),
}
"""Part -> the other parts it may import. A part is a package or a module directly under `tenuto`."""

FACES = ("native", "openai", "anthropic", "sglang", "ollama", "llama_cpp")
"""The interfaces of `serve`, each a package of its own."""
MAY_IMPORT_IN_SERVE = {"shared": {"shared"}, **{face: {face, "shared"} for face in FACES}}
"""Package of `serve` -> the modules of `serve` it may import. Modules beside the packages may import `shared` and each
other, and the application may import the interfaces too."""

ONE_THING = {"tenuto.session.turn": "tenuto.session.session"}
"""Modules that import each other as types and count as one: a session and its open turn refer to each other."""

MAY_IMPORT_TORCH = {"exec", "models", "kernels"}
WITHOUT_TORCH = ("base", "formats", "memory", "text", "session", "sched", "engine", "exec.witness")
"""Packages and modules that must load without torch: the whole life of a session, without a model."""


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted((SOURCE / "tenuto").rglob("*.py"))}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def nodes(tree: ast.AST, *, at_import_only: bool) -> Iterator[ast.AST]:
    """Returns all nodes of a module, or only those that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if at_import_only and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))
        ):
            continue
        yield node
        yield from nodes(node, at_import_only=at_import_only)


def imports(module: str, *, at_import_only: bool = False) -> Iterator[str]:
    """Returns the full names of everything `module` imports; names inside our package are resolved to modules."""
    for node in nodes(ast.parse(MODULES[module].read_text(encoding="utf-8")), at_import_only=at_import_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}; imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module or ""


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards_only(module: str) -> None:
    part = part_of(module)
    assert part in MAY_IMPORT, f"{part} has no place in the layout: add it to MAY_IMPORT"
    allowed = MAY_IMPORT[part] | {part}
    wrong = {name for name in imports(module) if name.split(".")[0] == "tenuto" and part_of(name) not in allowed}
    assert not wrong, f"{module} imports {sorted(wrong)}; {part} may import {sorted(allowed)}"


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("tenuto.serve.")])
def test_interfaces_share_only_the_shared_modules_and_the_application(module: str) -> None:
    imported = {name.split(".")[2] for name in imports(module) if name.startswith("tenuto.serve.")}
    package = module.split(".")[2]
    if package in MAY_IMPORT_IN_SERVE:
        wrong = imported - MAY_IMPORT_IN_SERVE[package]
    else:
        wrong = imported & set(FACES) if module != "tenuto.serve.app" else set()
    assert not wrong, f"{module} imports {sorted(wrong)} of tenuto.serve"


@pytest.mark.parametrize("module", MODULES)
def test_only_the_executor_side_imports_torch(module: str) -> None:
    if part_of(module) not in MAY_IMPORT_TORCH:
        assert "torch" not in {name.split(".")[0] for name in imports(module)}


def test_the_package_root_imports_nothing_until_needed() -> None:
    if "tenuto" in MODULES:
        assert not [name for name in imports("tenuto", at_import_only=True) if name.startswith("tenuto")]


def assert_acyclic(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {name for name in imports(module, at_import_only=True) if name in MODULES and name != module}
        for module in MODULES
    }
    assert_acyclic(graph)


@pytest.mark.parametrize("part", ["memory", "session", "client", "integrations", "api", "serve"])
def test_imports_inside_a_package_are_acyclic_even_for_types(part: str) -> None:
    graph: dict[str, set[str]] = {}
    for module in (module for module in MODULES if part_of(module) == part):
        one = ONE_THING.get(module, module)
        known = {ONE_THING.get(name, name) for name in imports(module) if part_of(name) == part and name in MODULES}
        graph.setdefault(one, set()).update(known - {one})
    assert_acyclic(graph)


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) == "engine"])
def test_the_core_of_the_engine_does_not_import_the_thread_around_it(module: str) -> None:
    thread = "tenuto.engine.thread"
    assert module.startswith(thread) or not [name for name in imports(module) if name.startswith(thread)]


def test_the_life_of_a_session_loads_without_torch() -> None:
    roots = tuple(f"tenuto.{name}" for name in WITHOUT_TORCH)
    modules = [m for m in MODULES if m in roots or m.startswith(tuple(f"{root}." for root in roots))]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
