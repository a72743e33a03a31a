"""Slips in the native kernels, which have to be compiled. See `slips`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from tenuto.kernels.native import build
from tests.sim.rewritten import rewrite


@dataclass(frozen=True)
class NativeSlip:
    """Replaces the first `old` in a file of the kernels with `new`."""

    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()}  ->  {self.new.strip() or 'nothing'}"

    @property
    def path(self) -> Path:
        """The file that the slip changes."""
        return build.SOURCES / self.file

    def plant(self) -> None:
        """Compiles the best variant for this machine into a separate directory, and loads no other, until the process
        ends."""
        sources = Path(mkdtemp(prefix="slip-"))
        for path in (*build.SOURCES.glob("*.h"), *build.SOURCES.glob("*.cpp")):
            shutil.copy(path, sources)
        text = (sources / self.file).read_text()
        if self.old not in text:
            raise ValueError(f"the source of this slip is gone: {self}")
        (sources / self.file).write_text(text.replace(self.old, self.new, 1))
        build.SOURCES = sources
        rewrite(build.__name__, lambda source: _elsewhere(source, sources))


def _elsewhere(source: str, directory: Path) -> str:
    """Returns `build` for one variant, with its results in `directory`."""
    one = "if self.features.issuperset(map(_kernel_name, needs))]"
    return source.replace('cache / "kernels"', f"Path({str(directory)!r})").replace(one, f"{one}[:1]")


INT8 = (
    NativeSlip("kv_cache.h", "highest16(most) / 127.0f;", "highest16(most) / 130.0f;"),
    NativeSlip("kv_cache.h", "(uint16_t)((bits + 0xFFFFu) >> 16)", "(uint16_t)(bits >> 16)"),
    NativeSlip("kv_cache.h", "fours[i] ^ 0x80808080u", "fours[i]"),
    NativeSlip("kv_cache.h", "scales(cache, block, d / BLOCK) + lane", "scales(cache, block, 0) + lane"),
    NativeSlip("kv_cache.h", "set_scale(scales(cache, block, parts(cache)) + lane, value", "set_scale(scales(cache, block, 0) + lane, value"),
    NativeSlip("kv_cache.h", "(parts(cache) + 2) / 2 * 64", "(parts(cache) + 1) / 2 * 64"),
    NativeSlip("attention_int8.h", "queries.offsets[row + r][part])", "queries.offsets[row + r][0])"),
    NativeSlip("attention_blocks.h", "most = max16(most, chunk.masked(load<f32x16>(numbers + i * LANES), i, first[r], end[r]));", "most = max16(most, load<f32x16>(numbers + i * LANES));"),
)  # fmt: skip
"""Slips in 8-bit keys and values."""

RECURRENT = (
    NativeSlip("recurrent.h", "stop = slots.keeps[row] ? 0 : count", "stop = count"),
    NativeSlip("recurrent.h", "(int64_t)(kept + absorbed + i) * width", "(int64_t)(kept + i) * width"),
    NativeSlip("recurrent.h", "if (i >= -absorbed)\n", "if (i > -absorbed)\n"),
    NativeSlip("recurrent.h", "if (i == 0 && keeps)", "if (i == 1 && keeps)"),
    NativeSlip("recurrent.h", "if (keeps && !absorbed && before != written)", "if (false)"),
    NativeSlip("recurrent.h", "kept[0] = work.projected(first + i)", "kept[0] = work.projected(first)"),
    NativeSlip("recurrent.h", "(int64_t)row_id * group_.layers + layer", "(int64_t)row_id + layer"),
)  # fmt: skip
"""Slips in what recurrent layers keep and absorb."""
