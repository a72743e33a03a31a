"""Types of matrices that safetensors files quantize in groups of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tenuto.kernels.native.formats import Blocks, Bytes, Conversion, Floats, PanelFormat

BLOCK = 32
_WITH_HALVES = {PanelFormat.INT4: PanelFormat.Q4_0, PanelFormat.INT8: PanelFormat.Q8_0}


@dataclass(frozen=True, slots=True)
class Grouped:
    """The type of a matrix in which `group` neighbouring inputs of an output share a scale: a number of blocks of 32
    inputs that is a power of two, or all inputs. `numbers` is INT4, INT8 or FP8.

    An output has its quants, 16 bytes a block for INT4 and 32 otherwise, then float32 scales [groups] and, unless its
    numbers are FP8, float32 minima [groups]. Those of INT4 and INT8 are unsigned, and w = scale * quant + minimum; 4
    bits of weights i and 16 + i of a block are in its byte i, those of the first lower. FP8 is E4M3, without NaN.
    `halves`: all scales are float16, and all minima are those of signed integers, so that panels need no minima.
    """

    numbers: PanelFormat
    group: int
    halves: bool = False

    @property
    def name(self) -> str:
        return self.numbers.name

    def conversion(self, inputs: int) -> Conversion:
        """Returns the conversion of rows of this type, uint8 [rows, bytes], to panels."""

        def split(rows: Bytes) -> Blocks:
            quants, scales = self._parts(rows, inputs)
            kept = (scales[0].astype(np.float16),) if self.halves else tuple(scales)
            return Blocks(quants, kept, 2 if self.numbers is PanelFormat.FP8 else 4)

        return Conversion(_WITH_HALVES[self.numbers] if self.halves else self.numbers, split)

    def decode(self, rows: Bytes, inputs: int) -> Floats:
        """Decodes rows of this type, uint8 [rows, bytes], to float32 [rows, inputs]."""
        quants, arrays = self._parts(rows, inputs)
        if self.numbers is PanelFormat.INT4:
            quants = np.concatenate((quants & 15, quants >> 4), axis=-1)
        values = quants.reshape(len(rows), inputs)
        scale, *minimum = (np.repeat(each, self.group, axis=1)[:, :inputs] for each in arrays)
        return values * scale + minimum[0] if minimum else E4M3[values] * scale

    def _parts(self, rows: Bytes, inputs: int) -> tuple[Bytes, list[Floats]]:
        """Returns the quants, uint8 [rows, blocks, bytes], and scales and minima, float32 [rows, groups]."""
        end, arrays = inputs // BLOCK * self.numbers.quant_bytes, len(self.numbers.scales)
        behind = np.ascontiguousarray(rows[:, end:]).view(np.float32)
        return rows[:, :end].reshape(len(rows), -1, self.numbers.quant_bytes), np.split(behind, arrays, axis=1)


def in_halves(quants: Bytes) -> Bytes:
    """Packs quants of 4 bits, uint8 [..., inputs], as `Grouped` has them: [..., inputs / 2]."""
    blocks = quants.reshape(*quants.shape[:-1], -1, 2, 16)
    packed: Bytes = blocks[..., 0, :] | blocks[..., 1, :] << np.uint8(4)
    return packed.reshape(*quants.shape[:-1], -1)


def _e4m3() -> Floats:
    codes = np.arange(256, dtype=np.uint32)
    bits = (codes & 0x80) << 24 | (codes & 0x7F) << 20  # of floats that are 2^120 times too small
    return bits.view(np.float32) * np.float32(2.0**120)


E4M3 = _e4m3()
"""The values of E4M3 (arXiv:2209.05433), a float of 8 bits; in place of NaN, 480."""
