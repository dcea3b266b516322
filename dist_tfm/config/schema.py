"""The configuration: one frozen dataclass a section. Files in configs/ fill them, dotted overrides come last.

Bounds stand beside each field and are checked by pydantic; what spans several fields is checked in `check`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.api import SECTION, DataConfig, NotNegative, Positive, TokenizerConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "LaunchConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainConfig",
]

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True)
class ModelConfig:
    """Section `model`: the encoder-decoder of Vaswani et al. 2017, section 3; the shards give the vocabulary's size."""

    __pydantic_config__ = SECTION

    encoder_layers: Positive = 6
    decoder_layers: Positive = 6
    d_model: Positive = 512
    d_ff: Positive = 2048
    heads: Positive = 8
    kv_heads: Positive | None = None  # heads of keys and values, shared by groups of heads; null: as many as heads
    d_k: Positive | None = None  # width of a head's queries and keys; null: d_model / heads
    d_v: Positive | None = None  # width of a head's values; null: d_model / heads
    dropout: Probability = 0.1  # P_drop (section 5.4): on each sublayer's output, and on embeddings unless named
    embedding_dropout: Probability | None = None  # null: the same as dropout
    attention_dropout: Probability = 0.0  # on attention weights; the paper has none, Tensor2Tensor has
    norm: Literal["post", "pre", "deep"] = "post"  # deep: DeepNorm, post-norm with a weighted residual
    normalization: Literal["layer", "rms"] = "layer"
    final_norm: bool | None = None  # a norm at the end of each stack; null: of pre-norm stacks alone
    activation: Literal["relu", "gelu", "silu", "swiglu", "geglu", "geglu_tanh"] = "relu"
    positions: Literal["sinusoidal", "sinusoidal_concatenated", "learned", "rotary", "relative"] = "sinusoidal"
    max_positions: Positive = 1024  # of learned positions, a longer input is refused
    relative_buckets: Annotated[int, Field(ge=4, le=4096)] = 32  # of relative positions: numbers that each head learns
    relative_distance: Positive = 128  # of relative positions: all distances from here on share a bucket
    attention_bias: bool = False  # biases in the projections of attention; the paper has none, Marian has
    output_bias: bool = False  # a bias for each token's score; the paper has none, Marian has
    tied: Literal["all", "inputs", "decoder", "none"] = "all"  # which of source, target embedding, projection are one
    layer_norm_eps: Fraction = 1e-6
    self_attention: Literal["full", "window", "linear"] = "full"  # the others are other functions, not faster kernels
    window: Positive = 128  # of window: how far a query sees, to each side
    attention: Literal["auto", "sdpa", "matmul", "reference", "flex"] = "auto"  # docs/speed.md

    @property
    def key_width(self) -> int:
        """Width of one head's queries and keys, d_k."""
        return self.d_k if self.d_k is not None else self.d_model // self.heads

    @property
    def value_width(self) -> int:
        """Width of one head's values, d_v."""
        return self.d_v if self.d_v is not None else self.d_model // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: `heads`, or fewer that are shared (grouped-query attention)."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layers have a gate, and no biases."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    @property
    def ends_with_norm(self) -> bool:
        """Whether each stack has a norm at its end."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    @property
    def input_dropout(self) -> float:
        """Dropout on the sums of embeddings and positions."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout


@dataclass(frozen=True)
class OptimConfig:
    """Section `optim`: Adam (section 5.3). `weight_decay` is decoupled and acts on matrices only."""

    __pydantic_config__ = SECTION

    beta1: Probability = 0.9
    beta2: Probability = 0.98
    eps: Fraction = 1e-9
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    clip_norm: Annotated[float, Field(ge=0.0)] = 0.0  # bound of the global gradient norm; 0: no clipping (the paper)


@dataclass(frozen=True)
class ScheduleConfig:
    """Section `schedule`: the learning rate by optimizer update (section 5.3); it never reads train.steps.

    noam: factor * d_model^-0.5 * min(u^-0.5, u * warmup^-1.5). inverse_sqrt: peak * min(u / warmup, (warmup / u)^0.5).
    """

    __pydantic_config__ = SECTION

    kind: Literal["noam", "inverse_sqrt"] = "noam"
    warmup: Positive = 4000
    factor: Fraction = 1.0
    peak: Fraction = 1e-3


@dataclass(frozen=True)
class TrainConfig:
    """Section `train`: how long, where, from which seed."""

    __pydantic_config__ = SECTION

    steps: Positive = 100_000
    run_dir: str = "runs/default"
    seed: int = 1
    validate_every: NotNegative = 1000
    max_skips: Positive = 10  # this many non-finite steps in a row end the run with exit code 3
    activation_checkpointing: Annotated[
        str, Field(pattern=r"^(none|full|attention|feed_forward|every_[1-9][0-9]{0,3})$")
    ] = "none"  # what is computed again instead of kept; every_n: each n-th layer; docs/speed.md
    kernels: Literal["torch", "native"] = "torch"  # native: loss rows, dropout and Adam in C++, on CPUs; docs/speed.md
    compile: bool = False  # whether layers are compiled by torch.compile: minutes at the start of every run
    label_smoothing: Probability = 0.1
    ema: Probability = 0.0  # decay of a moving average of the weights, kept in checkpoints; 0: none (the paper)
    init_from: str = ""  # a run directory or checkpoint whose weights a new run starts from


@dataclass(frozen=True)
class ParallelConfig:
    """Section `parallel`: how a model is divided over processes; tp x pp of them hold one replica, the rest is data
    parallelism, which divides the optimizer's state (ZeRO 0 to 3)."""

    __pydantic_config__ = SECTION

    tp: Positive = 1  # tensor parallelism: ranks (of one host) that divide heads, d_ff and the vocabulary
    pp: Positive = 1  # pipeline parallelism: ranks that divide the layers
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1


@dataclass(frozen=True)
class PrecisionConfig:
    """Section `precision`. bf16: fp32 master weights and accumulation (stages 1 to 3), autocast at stage 0. fp16: the
    same with a loss scale that finds itself, on GPUs, at stages 1 to 3."""

    __pydantic_config__ = SECTION

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    matmul: Literal["highest", "high", "medium"] = "highest"  # products of fp32 matrices: how exact; docs/speed.md


@dataclass(frozen=True)
class CheckpointConfig:
    """Section `checkpoint`: the last `keep` ones and the best one stay. Weights-only snapshots are kept apart, for
    averaging (section 6.1)."""

    __pydantic_config__ = SECTION

    every_steps: NotNegative = 1000  # 0: only at the end
    keep: Positive = 3
    snapshot_every: NotNegative = 0  # steps between weights-only snapshots; 0: none
    keep_snapshots: Positive = 5
    best_metric: Literal["valid_nll", "valid_bleu"] = "valid_nll"


@dataclass(frozen=True)
class LogConfig:
    """Section `log`."""

    __pydantic_config__ = SECTION

    every_steps: NotNegative = 10  # steps between lines of metrics.jsonl; step 1 is always logged; 0: never
    tensorboard: bool = True


@dataclass(frozen=True)
class DecodeConfig:
    """Section `decode`: translating (section 6.1), and validation's greedily decoded sample."""

    __pydantic_config__ = SECTION

    beam: Positive = 4  # hypotheses searched side by side; 1: greedy
    length_penalty: Literal["gnmt", "average", "none"] = "gnmt"  # gnmt: the paper's, ((5 + length) / 6)^alpha
    alpha: Annotated[float, Field(ge=0.0)] = 0.6  # of gnmt
    n_best: Positive = 1  # translations of each line, best first; at most beam
    min_length: NotNegative = 0  # fewest tokens of an output
    max_extra: Positive = 50  # longest output: input + this
    max_source: Positive = 1000  # tokens of an input line; what is longer is cut, with a warning
    batch_tokens: Positive = 2048  # padded source tokens decoded together
    batch_sentences: NotNegative = 0  # most sentences decoded together; 0: as many as batch_tokens allows
    window: Positive = 1000  # lines read, sorted by length and shared out together
    exact: bool = True  # fp32: decisions within rounding are taken again in float64, so that batches change no output
    valid_sentences: NotNegative = 100  # held-out sentences decoded greedily at each validation; 0: none
    show: NotNegative = 3  # of these, how many are printed beside their references


@dataclass(frozen=True)
class LaunchConfig:
    """Section `launch`: this process's hardware and patience."""

    __pydantic_config__ = SECTION

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0, le=4096)] = (
        0  # of one process on a CPU; 0: the machine's cores divided by its local ranks
    )
    hang_timeout: Annotated[int, Field(ge=1, le=10_000_000)] = (
        1800  # seconds after which a rank that the others wait for, but do not hear of, ends the job
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    __pydantic_config__ = SECTION

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
