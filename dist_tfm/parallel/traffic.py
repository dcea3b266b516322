"""How many bytes tensor and pipeline parallelism send, in closed form."""

from typing import NamedTuple

from dist_tfm.config.schema import ModelConfig
from dist_tfm.parallel.partition import StagePlan


class TensorTraffic(NamedTuple):
    """Bytes that each tensor-parallel rank gives to all-reduces for one micro-batch, by pass.

    An all-reduce over R ranks of n bytes sends and receives 2 (R - 1) / R n bytes at each rank, if it is a ring.
    """

    forward: int
    loss: int
    backward: int

    @property
    def total(self) -> int:
        """Of the whole micro-batch."""
        return sum(self)


def tensor_traffic(
    model: ModelConfig, source_cells: int, target_cells: int, labels: int, item_bytes: int
) -> TensorTraffic:
    """The traffic of a micro-batch without recomputation (which repeats the layers' forward part).

    With S = source_cells and T = target_cells the padded positions of a side, N = labels that are not pads, L_e and L_d
    the layers, D = d_model and b = item_bytes of an activation:
    forward b D ((1 + 2 L_e) S + (1 + 3 L_d) T): embeddings, and each sublayer's output;
    loss 16 N: maximum, sum of exponentials, right score and sum of scores, in fp32;
    backward b D ((2 L_e + L_d) S + 3 L_d T + N): each sublayer's input, the memory once a decoder layer, and the
    projection's input.
    """
    encoder, decoder, row = model.encoder_layers, model.decoder_layers, item_bytes * model.d_model
    return TensorTraffic(
        forward=row * ((1 + 2 * encoder) * source_cells + (1 + 3 * decoder) * target_cells),
        loss=16 * labels,
        backward=row * ((2 * encoder + decoder) * source_cells + 3 * decoder * target_cells + labels),
    )


def pipeline_traffic(plan: StagePlan, source_cells: int, target_cells: int, item_bytes: int) -> list[int]:
    """Bytes that a micro-batch sends across each cut of a pipeline, forward; as many come back as gradients.

    With S = source_cells, T = target_cells, D = d_model and b = item_bytes of a hidden state: b D S across a cut in the
    encoder or at its end, b D (S + T) across one in the decoder.
    """
    cells = {"source": source_cells, "target": target_cells}
    row = item_bytes * plan.model.d_model
    return [row * sum(cells[side] for side in plan.sent(stage)) for stage in range(plan.last)]
