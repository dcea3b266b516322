"""Sliding-window attention: Vaswani et al. 2017, section 4, "restricted to considering only a neighborhood of size r".

Another function than full attention, not a faster way to the same one: what is farther away is not seen.
Shapes: B batch, H heads, Tq queries, Tk keys, r window.
"""

import torch
from torch import Tensor

from dist_tfm.model.attention_kernels import Attend, Weighting

LEAST_BLOCK = 64
"""Queries that are taken together at least: smaller products cost more to start than to compute."""


class WindowAttend:
    """A kernel each of whose queries sees the keys at most r positions away, or if causal the r before it and itself.

    Queries are taken in blocks, each with the keys that any of them sees: time and memory grow with Tq (r + block), not
    with Tq Tk. A cached decoder's newest query costs r + 1 keys.
    """

    def __init__(self, attend: Attend, window: int) -> None:
        """attend: the kernel that is called for each block; window: r."""
        self._attend, self._window = attend, window
        self._block = max(window, LEAST_BLOCK)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """See `dist_tfm.model.attention_kernels.Attend`; queries are aligned to the lower right, as causal ones are."""
        mask, causal, _, bias = weighting
        queries, keys = query.size(2), key.size(2)
        if keys <= self._window + 1:
            return self._attend(query, key, value, weighting)
        shift, places = keys - queries, torch.arange(keys, device=query.device)
        outputs = []
        for first in range(0, queries, self._block):
            rows = slice(first, min(first + self._block, queries))
            ahead = 0 if causal else self._window
            columns = slice(max(0, shift + first - self._window), min(keys, shift + rows.stop + ahead))
            visible = self._visible(places[columns][None, :] - places[shift:][rows][:, None], causal)
            visible = visible.expand(query.size(0), 1, -1, -1)
            if mask is not None:
                visible = visible & (mask if mask.size(2) == 1 else mask[:, :, rows])[..., columns]
            part = None if bias is None else bias[:, :, rows, columns]
            inputs = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            outputs.append(self._attend(*inputs, weighting._replace(mask=visible, causal=False, bias=part)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _visible(self, distances: Tensor, causal: bool) -> Tensor:
        """Positions of keys minus those of queries [Tq, Tk] to what is seen."""
        near = distances >= -self._window
        return near & (distances <= (0 if causal else self._window))
