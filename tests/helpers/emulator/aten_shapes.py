"""Cases for joining, repeating, rearranging, copying and creating tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from helpers.emulator.aten_draw import ALL, FLOATS, INTEGERS, NUMBERS, Case, broadcast, index, sized, tensor


def shapes() -> list[Case]:
    return [
        Case("cat", lambda a, b: torch.cat((a, b), -1), [sized(3, 4), sized(3, 5)], ALL),
        Case("cat first", lambda a, b: torch.cat((a, b, a)), [sized(3, 4), sized(2, 4)], ALL),
        Case("cat nothing", lambda a, b: torch.cat((a, b)), [sized(0), sized(3, 4)], NUMBERS),
        Case("stack", lambda a, b: torch.stack((a, b), 1), [tensor(), tensor()], NUMBERS, dims=1),
        Case("split", lambda x: [each + 0 for each in x.split((2, 3), 0)], [sized(5, 4)], NUMBERS),
        Case("chunk", lambda x: [each * 1 for each in x.chunk(3, -1)], [sized(2, 7)], NUMBERS),
        Case("repeat", lambda x: x.repeat(2, 3, 1), [sized(3, 4)], ALL),
        Case("tile", lambda x: x.tile(2), [tensor()], NUMBERS, dims=1),
        Case("repeat_interleave", lambda x: x.repeat_interleave(3, 0), [sized(3, 4)], NUMBERS),
        Case("repeat_interleave flat", lambda x: x.repeat_interleave(2), [sized(3, 4)], NUMBERS),
        Case(
            "repeat_interleave tensor", lambda x, n: x.repeat_interleave(n, 0), [sized(5, 4), index(5, end=4)], NUMBERS
        ),
        Case("expand", lambda x: x.expand(3, 4, 5).contiguous(), [sized(4, 1)], ALL),
        Case("permute", lambda x: x.permute(2, 0, 1).contiguous(), [sized(2, 3, 4)], ALL),
        Case("transpose", lambda x: x.transpose(0, -1).contiguous(), [tensor()], ALL, dims=2),
        Case("reshape", lambda x: x.transpose(0, 1).reshape(-1), [sized(3, 4)], ALL),
        Case("flip", lambda x: x.flip(0, -1), [tensor()], NUMBERS, dims=2),
        Case("roll", lambda x: x.roll((1, -2), (0, 1)), [sized(4, 5)], NUMBERS),
        Case("roll flat", lambda x: x.roll(3), [sized(4, 5)], NUMBERS),
        Case("pad", lambda x: functional.pad(x, (1, 2, 0, 1), value=3), [sized(3, 4)], NUMBERS),
        Case("pad negative", lambda x: functional.pad(x, (-1, 2)), [sized(3, 4)], NUMBERS),
        Case("pad reflect", lambda x: functional.pad(x, (1, 2), mode="reflect"), [sized(2, 3, 4)], FLOATS[:2]),
        Case("triu", lambda x: x.triu(1), [sized(5, 4)], NUMBERS, out=False),
        Case("tril", lambda x: x.tril(-1), [sized(2, 5, 4)], NUMBERS),
        Case("triu mask", lambda x: torch.ones(x.shape[-1], 6, device=x.device, dtype=torch.bool).triu(1), [sized(4)]),
        Case("copy_", lambda x, y: x.copy_(y), [tensor(), broadcast()], ALL, inplace=True),
        Case("copy_ cast", lambda x, y: x.copy_(y), [tensor(), tensor(dtype=torch.float32)], NUMBERS, inplace=True),
        Case("to float32", lambda x: x.to(torch.float32), [tensor()], ALL),
        Case("to bfloat16", lambda x: x.to(torch.bfloat16), [tensor()], (torch.float32, torch.float16)),
        Case("to int32", lambda x: x.to(torch.int32), [tensor()], FLOATS),
        Case("to bool", lambda x: x.bool(), [tensor(-1, 1)], INTEGERS),
        Case("clone", lambda x: x.clone(), [tensor()], ALL),
        Case("zero_", Tensor.zero_, [tensor()], ALL, inplace=True),
        Case("fill_", lambda x: x.fill_(2), [tensor()], NUMBERS, inplace=True),
        Case("fill_ tensor", lambda x, v: x.fill_(v), [tensor(), sized()], NUMBERS, inplace=True),
        Case("fill_diagonal_", lambda x: x.fill_diagonal_(5), [sized(4, 6)], FLOATS, inplace=True),
        Case(
            "zeros ones full",
            lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3)),
            [tensor()],
            NUMBERS,
        ),
        Case("arange", lambda x: torch.arange(2, 20, 3, device=x.device, dtype=x.dtype), [sized()], NUMBERS),
        Case("arange float", lambda x: torch.arange(0, 1, 0.125, device=x.device, dtype=x.dtype), [sized()]),
        Case("linspace", lambda x: torch.linspace(-1, 1, 9, device=x.device, dtype=x.dtype), [sized()]),
        Case("eye", lambda x: torch.eye(3, 5, device=x.device, dtype=x.dtype), [sized()], FLOATS[:2]),
    ]
