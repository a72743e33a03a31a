"""The kernels for GPUs compile for each generation of GPUs to what they were written for."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import tenuto
from tests.kernels.gpu.compiled import SHARED, compiled, known
from tests.kernels.gpu.launches import LAUNCHES

SOURCES = Path(tenuto.__file__).parent


def launched() -> set[tuple[str, str]]:
    """Returns the modules and names of all Triton functions that the package launches, `function[grid](...)`."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        if "triton" not in text:
            continue
        module = import_module(".".join(path.relative_to(SOURCES.parent).with_suffix("").parts))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                try:
                    value = eval(ast.unparse(node.func.value), vars(module))
                except NameError:  # a local variable
                    continue
                function = getattr(value, "fn", None)
                if function is not None:
                    found.add((function.__module__, function.__name__))
    return found


def test_launches_are_found_in_the_sources() -> None:
    assert len(launched()) > 30


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_keep_to_registers_and_shared_memory_and_use_tensor_cores(capability: int, tmp_path: Path) -> None:
    found = compiled(capability, tmp_path)
    assert {each.launch for each in found} == LAUNCHES.keys()
    assert launched() - {(each.module, each.kernel) for each in found} == set(), "every function is compiled"
    for each in found:
        assert each.result.stack == 0, f"{each} spills registers"
        assert each.result.shared <= SHARED[capability], f"{each} needs too much shared memory"
        if each.kernel in LAUNCHES[each.launch].products:
            assert each.result.products, f"{each} does not multiply on tensor cores"
            assert each.result.copies, f"{each} does not copy asynchronously"
            if each.kernel == "prefill":
                assert each.result.newest_products, f"{each} does not use this generation's tensor cores"
    if results := known():
        new = [each for each in found if results.get(each.key) != each.result]
        assert not new, f"python -m tests.kernels.gpu.compiled has to write these anew: {new}"
