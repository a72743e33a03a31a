"""Removes one call of release, share, transfer, truncate, pin or refer from the core: the simulator must notice."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import tenuto
from tests.sim.rewritten import rewrite

SOURCE = Path(tenuto.__file__).parent
PACKAGES = ("memory", "session", "sched", "engine")
WORDS = (
    "release",
    "share",
    "transfer",
    "truncate",
    "absorb",
    "cut",
    "slide",
    "trim",
    "pin",
    "unpin",
    "relax",
    "refer",
    "reader",
    "lose",
    "reject",
)


@dataclass(frozen=True)
class Mutant:
    """One call: its module, line, column, end and source."""

    module: str
    line: int
    column: int
    end: tuple[int, int]
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.text}"

    def plant(self) -> None:
        """Removes the call from the loaded module until the process ends."""
        rewrite(self.module, self._without)
        vars(sys.modules[self.module])["_uncounted"] = _uncounted

    def _without(self, source: str) -> ast.Module:
        return ast.fix_missing_locations(_Remover(self).visit(ast.parse(source)))


def concerns_memory(name: str) -> bool:
    """Returns whether a method's name suggests that it releases, shares, transfers or truncates."""
    return any(part in WORDS for part in name.strip("_").split("_"))


def find_mutants() -> list[Mutant]:
    """Finds every such call in the core."""
    found = []
    for package in PACKAGES:
        for path in sorted((SOURCE / package).rglob("*.py")):
            source = path.read_text()
            module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            for node in ast.walk(ast.parse(source)):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and concerns_memory(node.func.attr)
                ):
                    text = " ".join((ast.get_source_segment(source, node) or "").split())
                    end = (node.end_lineno or 0, node.end_col_offset or 0)
                    found.append(Mutant(module, node.lineno, node.col_offset, end, text))
    return sorted(found, key=lambda m: (m.module, m.line, m.column, m.end))


class _Remover(ast.NodeTransformer):
    """Removes one call. A statement becomes `pass`, a share an uncounted lease, a transfer the same lease unmoved, and
    any other value None."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def _is_it(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and (node.lineno, node.col_offset) == (self._mutant.line, self._mutant.column)
            and (node.end_lineno, node.end_col_offset) == self._mutant.end
        )

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if self._is_it(node.value):
            return ast.copy_location(_left_of(node.value), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not self._is_it(node):
            return self.generic_visit(node)
        function = node.func
        assert isinstance(function, ast.Attribute)
        if function.attr == "share":
            replaced: ast.expr = ast.Call(ast.Name("_uncounted", ast.Load()), [function.value, *node.args], [])
        elif function.attr == "transfer":
            replaced = function.value
        else:
            replaced = ast.Constant(None)
        return ast.copy_location(replaced, node)


def _left_of(call: ast.expr) -> ast.stmt:
    """Returns what replaces a removed statement: `super()` if the call used it, so that the function keeps the same
    free variables."""
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    owner = call.func.value
    return ast.Expr(owner) if ast.unparse(owner) == "super()" else ast.Pass()


def _uncounted(lease, start: int, stop: int, holder):
    """Shares without raising the count."""
    return type(lease)(lease.pool, lease.units[start:stop], holder)
