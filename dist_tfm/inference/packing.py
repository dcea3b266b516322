"""Weights laid out once as the CPU's bf16 product kernels want them, where oneDNN would do it in every product.

Decoding multiplies a few rows with every matrix of the model at each step, so that bringing a matrix into the kernel's
layout costs about as much as the product. Which numbers come out does not change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dist_tfm.model.transformer import Transformer


class PackedLinear(nn.Module):
    """x W^T + b with a packed copy of W [out, in], bf16 on a CPU; for inference: it has no parameters."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


class PackedTransformer(Transformer):
    """A Transformer for inference alone whose every product with a matrix is packed; `embedding.weight` stays for
    looking tokens up."""

    def __init__(self, model: Transformer) -> None:
        """Takes over the weights of `model`, which is left as it was. Raises ValueError unless `can_pack` them."""
        if not can_pack(model.embedding.weight):
            raise ValueError("expected a model in bf16 on a CPU that multiplies in bf16")
        with torch.device("meta"):
            super().__init__(model.config, model.vocab_size, model.source_vocab_size)
        self.load_state_dict(model.state_dict(), assign=True)
        matrix = self.embedding.weight if self.projection is None else self.projection.weight
        self._output, self.projection = PackedLinear(matrix, self.output_bias), None
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child.weight, child.bias))
        self.eval().requires_grad_(False)

    def logits(self, hidden: Tensor) -> Tensor:
        """As of Transformer."""
        scores: Tensor = self._output(hidden)
        return scores


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has packed kernels for the dtype and device of `weight`."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(built and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_where_possible(models: Sequence[Transformer]) -> list[Transformer]:
    """The models, for inference: those whose weights can be packed with packed weights, the others as they are."""
    return [PackedTransformer(model) if can_pack(model.embedding.weight) else model for model in models]
