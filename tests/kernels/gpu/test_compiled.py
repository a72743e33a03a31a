"""The kernels for GPUs compile for each generation of GPUs to what they were written for."""

from pathlib import Path

import pytest

from tests.kernels.gpu.compiled import SHARED, compiled
from tests.kernels.gpu.launches import LAUNCHES


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_keep_to_registers_and_shared_memory_and_use_tensor_cores(capability: int, tmp_path: Path) -> None:
    found = compiled(capability, tmp_path)
    assert {each.launch for each in found} == LAUNCHES.keys()
    for each in found:
        assert each.stack == 0, f"{each} spills registers"
        assert each.shared <= SHARED[capability], f"{each} needs too much shared memory"
        if each.kernel in LAUNCHES[each.launch].products:
            assert each.products, f"{each} does not multiply on tensor cores"
            assert each.copies, f"{each} does not copy asynchronously"
            if each.kernel == "prefill":
                assert each.newest_products, f"{each} does not use this generation's tensor cores"
