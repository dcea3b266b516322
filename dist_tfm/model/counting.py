"""The number of parameters in closed form, from the configuration alone."""

from dist_tfm.config.schema import ModelConfig


def parameter_counts(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Parameters by part: "embedding", "encoder", "decoder"; their sum is the whole model.

    With D = d_model, F = d_ff, H heads, V = vocab_size: embedding V*D, once for its three uses; attention
    2*D*H*d_k + 2*D*H*d_v; feed-forward 2*D*F + F + D; norm 2*D. An encoder layer has one attention, one feed-forward
    and two norms, a decoder layer one attention and one norm more; a pre-norm stack ends with one norm more.
    """
    width, inner = config.d_model, config.d_ff
    attention = 2 * width * config.heads * (config.key_width + config.value_width)
    feed_forward = 2 * width * inner + inner + width
    norm = 2 * width
    final = norm if config.norm == "pre" else 0
    return {
        "embedding": vocab_size * width,
        "encoder": config.encoder_layers * (attention + feed_forward + 2 * norm) + final,
        "decoder": config.decoder_layers * (2 * attention + feed_forward + 3 * norm) + final,
    }
