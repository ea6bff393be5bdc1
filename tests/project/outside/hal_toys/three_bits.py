"""A form that hal does not have: numbers of 3 bits in groups of 48 with float8 scales, its reader, and a CPU kernel."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hal.nn import Weight
from hal.ops import Form, Numbers, declare_numbers
from hal.ops.forms import scale_values
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.layer_patterns import ExcludedLayers
from hal.quantization.stored_layer import Reader, StoredAs, StoredLayer, Tensors
from hal.vendor import AddedKernel

EIGHT, BYTES = 8, 3
"""Eight numbers are in three bytes, the first in the lowest bits."""
SHIFTS = torch.arange(0, 24, 3)
FORM = Form("int3", columns=48, scales="e4m3")


def unpack(packed: Tensor) -> Tensor:
    """Return the numbers from -4 to 3 of uint8 ``[..., width * 3 / 8]``, float32 ``[..., width]``."""
    low, middle, high = packed.unflatten(-1, (-1, BYTES)).int().unbind(-1)
    words = low | middle << 8 | high << 16
    return ((words.unsqueeze(-1) >> SHIFTS.to(packed.device) & 7) - 4).flatten(-2).float()


def pack(numbers: Tensor) -> Tensor:
    """Return numbers from -4 to 3, ``[..., width]``, as :func:`unpack` takes them."""
    words = ((numbers.int() + 4).unflatten(-1, (-1, EIGHT)) << SHIFTS.to(numbers.device).int()).sum(-1)
    return torch.stack([words >> 8 * place & 255 for place in range(BYTES)], -1).flatten(-2).to(torch.uint8)


declare_numbers(Numbers("int3", torch.uint8, unpack, pack, bits=3, count=EIGHT, elements=BYTES, least=-4))


class Codes(Reader):
    """``codes`` ``[out_features, in_features / 8, 3]``, and ``scale`` of each group, float8."""

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        declare, eights = stored.layer.declare, {"in_features": EIGHT}
        axes = "out_features in_features bytes"
        return {
            "codes": declare("codes", axes, group_sizes=eights, sizes={"bytes": BYTES}, dtype=torch.uint8),
            "scale": declare("scale", group_sizes=stored.groups, dtype=torch.float8_e4m3fn),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        codes, scale = stored["codes"].flatten(-2), stored["scale"].view(torch.uint8)
        return {"weight": codes, "weight_scale": scale, "bias": stored.tensors.get("bias")}


class ThreeBits(CheckpointFormat):
    """A format of all linear layers in this form."""

    name = "three_bits"

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        return ExcludedLayers(StoredAs(FORM, Codes()), section.lists("modules_to_not_convert"))


SOURCE = """
extern "C" void linear3(const float* x, const unsigned char* weight, const float* scale, float* y,
                        long rows, long width, long out, long group) {
  const long groups = (width + group - 1) / group;
  for (long o = 0; o < out; ++o) {
    const unsigned char* own = weight + o * (width / 8 * 3);
    for (long row = 0; row < rows; ++row) {
      float total = 0;
      for (long g = 0; g < groups; ++g) {
        const long end = (g + 1) * group < width ? (g + 1) * group : width;
        float sums[8] = {0};
        for (long column = g * group; column < end; column += 8) {
          const unsigned char* at = own + column / 8 * 3;
          const unsigned word = at[0] | at[1] << 8 | at[2] << 16;
          for (int j = 0; j < 8; ++j) sums[j] += x[row * width + column + j] * (float)(int)((word >> 3 * j & 7) - 4);
        }
        float sum = 0;
        for (int j = 0; j < 8; ++j) sum += sums[j];
        total += sum * scale[o * groups + g];
      }
      y[row * out + o] = total;
    }
  }
}
"""


@functools.cache
def compiled() -> ctypes.CDLL:
    """Return the C++ kernel, compiled once in each process."""
    folder = Path(tempfile.mkdtemp())
    (folder / "linear3.cpp").write_text(SOURCE, encoding="utf-8")
    # Not -ffast-math: a library that is linked so makes the whole process flush subnormal numbers to zero.
    flags = ["-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, "linear3.cpp", "-o", "linear3.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "linear3.so"))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype | None,
    form: Form,
) -> Tensor:
    """See :func:`hal.ops.linear`. It widens numbers in registers."""
    rows, scale = x.reshape(-1, x.shape[-1]).float().contiguous(), scale_values(weight_scale, form).contiguous()
    weight = weight.contiguous()
    y = torch.empty(len(rows), len(weight))
    addresses = [ctypes.c_void_p(each.data_ptr()) for each in (rows, weight, scale, y)]
    sizes = [ctypes.c_long(each) for each in (*rows.shape, len(weight), form.columns)]
    compiled().linear3(*addresses, *sizes)
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], -1).to(x.dtype)


ON_CPU = AddedKernel("cpu", "linear", lambda form: form == FORM, linear)
