"""The number of parameters in closed form, from the configuration alone."""

from dist_tfm.config.schema import ModelConfig


def parameter_counts(config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None) -> dict[str, int]:
    """Parameters by part: "embedding" (the projection included), "encoder", "decoder"; their sum is the whole model.

    With D = d_model, F = d_ff, H heads, G heads of keys and values, V = vocab_size, U = source_vocab_size (V, unless
    the source has a vocabulary of its own): embedding V*D, (U + V)*D or (U + 2*V)*D by `tied`, and max_positions*D
    for each embedding where positions are learned; attention D*(H + G)*(d_k + d_v); feed-forward 2*D*F + F + D, gated
    3*D*F; norm 2*D, or D for RMSNorm. An encoder layer has one attention, one feed-forward and two norms, a decoder
    layer one attention and one norm more; a pre-norm stack ends with one norm more.
    """
    width, inner = config.d_model, config.d_ff
    attention = width * (config.heads + config.key_value_heads) * (config.key_width + config.value_width)
    gated = config.activation in ("swiglu", "geglu")
    feed_forward = 3 * width * inner if gated else 2 * width * inner + inner + width
    norm = width if config.normalization == "rms" else 2 * width
    final = norm if config.norm == "pre" else 0
    positions = config.max_positions if config.positions == "learned" else 0
    source_rows = (vocab_size if source_vocab_size is None else source_vocab_size) + positions
    rows = {"all": vocab_size + positions, "decoder": source_rows + vocab_size + positions}
    rows["none"] = rows["decoder"] + vocab_size
    return {
        "embedding": rows[config.tied] * width,
        "encoder": config.encoder_layers * (attention + feed_forward + 2 * norm) + final,
        "decoder": config.decoder_layers * (2 * attention + feed_forward + 3 * norm) + final,
    }
