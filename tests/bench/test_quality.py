"""The benchmark of quality measures that kernels compute nearly what float32 does."""

import re
import sys

import pytest

from bench.quality import main
from tests.exec.kernels import HERE


@pytest.mark.skipif(not HERE.compiler or not HERE.variants(), reason="there are no native kernels here")
def test_predictions_hardly_diverge_from_those_of_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", "--types", "Q4_1", "--windows", "1"])
    main()
    said = capsys.readouterr().out
    found = re.search(r"Q4_1 +100 % of the weights +([+-][\d.]+) %, ([\d.]+) nats", said)
    assert found is not None, said
    worse, divergence = map(float, found.groups())
    assert abs(worse) < 2
    assert 0 < divergence < 0.005
