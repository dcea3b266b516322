"""One pipeline stage of a Transformer: the same model, without the parts that other stages hold.

What stays keeps its place, and so its canonical name, its layer number and its dropout. Shapes: B batch, S source,
T target, D d_model.
"""

from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from dist_tfm.model.layers import FIRST_LAYER, SOURCE_EMBEDDING, TARGET_EMBEDDING, LayerRunner
from dist_tfm.model.transformer import Decoder, Encoder, Transformer
from dist_tfm.parallel.partition import StagePlan
from dist_tfm.parallel.tags import set_tag, tag_of


class Elsewhere(nn.Module):
    """Stands where another stage has a module. It has no parameters, and nothing may call it."""

    def forward(self, *inputs: Tensor) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError("this part of the model is on another pipeline stage")


def cut_stage(plan: StagePlan, stage: int, vocab_size: int, source_vocab_size: int | None = None) -> Transformer:
    """The model with what `stage` holds, its parameters in CPU memory and not yet initialised.

    Of the other stages' parameters no memory is taken, now or later.
    """
    with torch.device("meta"):
        model = Transformer(plan.model, vocab_size, source_vocab_size)
    _prune(model, "", plan, stage)
    return model.to_empty(device="cpu")


def _prune(module: nn.Module, prefix: str, plan: StagePlan, stage: int) -> None:
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}."
        held = [stage in plan.holders(path + parameter) for parameter, _ in child.named_parameters()]
        if all(held):
            continue
        if any(held) or isinstance(child, (Encoder, Decoder, nn.ModuleList)):
            _prune(child, path, plan, stage)
        else:
            setattr(module, name, Elsewhere())


def mark_replicas(model: nn.Module, plan: StagePlan, stage: int) -> None:
    """Leaves writing and counting a tied parameter to the first stage that holds it.

    Parameters must be tagged, and divided over tensor-parallel ranks if they are to be.
    """
    for parameter in model.parameters():
        tag = tag_of(parameter)
        if plan.holders(tag.name)[0] != stage:
            set_tag(parameter, tag._replace(writer=False))


class Stage:
    """Computes one stage of a model that `cut_stage` made."""

    def __init__(self, model: Transformer, plan: StagePlan, stage: int) -> None:
        self.model, self.plan, self.number = model, plan, stage

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.number == self.plan.last

    def forward(self, source: Tensor, target_in: Tensor, run: LayerRunner, *received: Tensor) -> tuple[Tensor, ...]:
        """source [B, S], target_in [B, T], and what entered (`StagePlan.received`: [B, S, D], then [B, T, D]), to what
        leaves (`StagePlan.sent`); the last stage gives the decoder's hidden states [B, T, D] alone."""
        model, plan, number = self.model, self.plan, self.number
        states = dict(zip(plan.received(number), received, strict=True))
        encoder, decoder = plan.encoder_layers(number), plan.decoder_layers(number)
        mask = model.source_mask(source)
        if number == 0:
            states["source"] = run(SOURCE_EMBEDDING, model.source_embedding or model.embedding, source)
        for i in encoder:
            states["source"] = run(FIRST_LAYER + i, model.encoder.layers[i], states["source"], mask)
        if model.encoder.norm is not None and encoder and encoder[-1] == plan.model.encoder_layers - 1:
            states["source"] = cast(Tensor, model.encoder.norm(states["source"]))
        if number == plan.target_stage:
            states["target"] = run(TARGET_EMBEDDING, model.embedding, target_in)
        for i in decoder:
            layer, place = model.decoder.layers[i], model.decoder.first_number + i
            states["target"] = run(place, layer, states["target"], states["source"], mask)
        if self.is_last:
            hidden = states["target"]
            return (hidden if model.decoder.norm is None else cast(Tensor, model.decoder.norm(hidden)),)
        return tuple(states[side] for side in plan.sent(number))
