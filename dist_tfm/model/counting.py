"""The number of parameters in closed form, from the configuration alone."""

from dist_tfm.config.schema import ModelConfig


def parameter_counts(config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None) -> dict[str, int]:
    """Parameters by part: "embedding" (the projection included), "encoder", "decoder"; their sum is the whole model.

    With D = d_model, F = d_ff, H heads, G heads of keys and values, V = vocab_size, U = source_vocab_size (V, unless
    the source has a vocabulary of its own): embedding V*D, 2*V*D, (U + V)*D or (U + 2*V)*D by `tied`, max_positions*D
    for each embedding where positions are learned, and V for a bias of the output; attention D*(H + G)*(d_k + d_v),
    its biases H*d_k + G*(d_k + d_v) + D; feed-forward 2*D*F + F + D, gated 3*D*F; norm 2*D, or D for RMSNorm. An
    encoder layer has one attention, one feed-forward and two norms, a decoder layer one attention and one norm more;
    with relative positions each self-attention has H*buckets more; a stack may end with one norm more.
    """
    width, inner, heads, shared = config.d_model, config.d_ff, config.heads, config.key_value_heads
    attention = width * (heads + shared) * (config.key_width + config.value_width)
    if config.attention_bias:
        attention += heads * config.key_width + shared * (config.key_width + config.value_width) + width
    relative = heads * config.relative_buckets if config.positions == "relative" else 0
    feed_forward = 3 * width * inner if config.gated else 2 * width * inner + inner + width
    norm = width if config.normalization == "rms" else 2 * width
    final = norm if config.ends_with_norm else 0
    positions = config.max_positions if config.positions == "learned" else 0
    source_rows = (vocab_size if source_vocab_size is None else source_vocab_size) + positions
    rows = {"all": vocab_size + positions, "decoder": source_rows + vocab_size + positions}
    rows |= {"inputs": rows["all"] + vocab_size, "none": rows["decoder"] + vocab_size}
    return {
        "embedding": rows[config.tied] * width + (vocab_size if config.output_bias else 0),
        "encoder": config.encoder_layers * (attention + relative + feed_forward + 2 * norm) + final,
        "decoder": config.decoder_layers * (2 * attention + relative + feed_forward + 3 * norm) + final,
    }
