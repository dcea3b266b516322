"""Which self-attention a layer has: the one place where the configuration chooses."""

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention import MultiHeadAttention
from dist_tfm.model.attention_kernels import Attend
from dist_tfm.model.flex_attention import FlexAttend
from dist_tfm.model.linear_attention import attend_linear
from dist_tfm.model.positions import RelativePositions, rotary_positions
from dist_tfm.model.window_attention import WindowAttend


def self_attention(config: ModelConfig, attend: Attend, causal: bool) -> MultiHeadAttention:
    """The self-attention that the configuration names (model.self_attention, model.positions).

    attend: the kernel of full attention, which that of windows is made of; causal: as it will be called (the decoder's
    is). Cross-attention sees everything in every model: source and target have no distance.
    """
    relative = RelativePositions(config, causal) if config.positions == "relative" else None
    attention = MultiHeadAttention(config, _kernel(config, attend), rotary_positions(config), relative)
    attention.fused = attention.fused and config.self_attention == "full"
    return attention


def _kernel(config: ModelConfig, attend: Attend) -> Attend:
    if config.self_attention == "window":
        return FlexAttend(config.window) if config.attention == "flex" else WindowAttend(attend, config.window)
    return attend_linear if config.self_attention == "linear" else attend
