"""Dropout (Srivastava et al. 2014; Vaswani et al. 2017, section 5.4) whose random numbers cost a CPU little."""

import torch
from torch import Tensor, nn

LEVELS = 1 << 16
"""A CPU drops with a probability that is a multiple of 1 / LEVELS, so that each number drawn serves four elements."""


class Dropout(nn.Dropout):
    """torch.nn.Dropout, which on a CPU draws 16 bits an element in place of a number.

    Torch draws a floating-point number for each element, one after another: a tenth of a training step in bf16. Both
    draw from torch's generator, so that what seeds it decides the mask. On other devices this is torch's dropout.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape: elements become 0 with probability p, and the others are divided by 1 - p."""
        dropped = round(self.p * LEVELS)
        if not self.training or x.device.type != "cpu" or not 0 < dropped < LEVELS:
            return super().forward(x)
        numbers = torch.randint(-(1 << 63), (1 << 63) - 1, (x.numel() // 4 + 1,))
        bits = numbers.view(torch.int16)[: x.numel()].view(x.shape)
        # In place, since torch turns numbers into x's type five times as fast as it turns booleans.
        kept = bits.ge_(dropped - LEVELS // 2)
        return x * kept.to(x.dtype).mul_(LEVELS / (LEVELS - dropped))
