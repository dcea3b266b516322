"""From files and overrides to a checked `Config`, and what may change between two attempts of one run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from data_pipeline.mixture import mixture_faults
from data_pipeline.prepared import location_faults
from data_pipeline.settings import Layers, build_sections, faults_error, read_saved_sections, to_yaml
from data_pipeline.tokenizer_training import tokenizer_faults
from dist_tfm.config.layout import layout_faults
from dist_tfm.config.schema import Config, DataConfig, DecodeConfig, ModelConfig

SECTIONS: Mapping[str, type] = {f.name: f.default_factory for f in dataclasses.fields(Config)}  # type: ignore[misc]

MAY_CHANGE = frozenset(
    {f"train.{key}" for key in ("steps", "run_dir", "validate_every", "max_skips")}
    | {f"train.{key}" for key in ("activation_checkpointing", "compile", "kernels")}
    | {f"data.{key}" for key in ("workers", "prepare_workers", "expected_pairs")}
    | {f"data.{key}" for key in ("cache", "cache_gigabytes", "on_error", "most_skipped")}
)
MAY_CHANGE_SECTIONS = frozenset({"parallel", "checkpoint", "log", "decode", "launch"})


def check_sections(sections: Mapping[str, Any]) -> None:
    """Faults that span several keys; raises ConfigError with all of them."""
    model, data = sections["model"], sections["data"]
    faults: list[str] = []
    if model.d_model % 2:
        faults.append(f"model.d_model: expected an even number (sines and cosines alternate), found {model.d_model}")
    if (model.d_k is None or model.d_v is None) and model.d_model % model.heads:
        faults.append(
            f"model.heads: expected a divisor of model.d_model={model.d_model}, found {model.heads}; "
            "or name both model.d_k and model.d_v"
        )
    faults += _model_faults(model, data)
    if data.batch_tokens // data.micro_batches < 2:
        faults.append(
            f"data.micro_batches: expected at most data.batch_tokens / 2 = {data.batch_tokens // 2} "
            f"(a micro-batch holds at least 2 tokens a side), found {data.micro_batches}"
        )
    if data.micro_batches % data.lanes:
        faults.append(f"data.lanes: expected a divisor of data.micro_batches={data.micro_batches}, found {data.lanes}")
    faults += _speed_faults(sections)
    faults += mixture_faults(data)
    faults += location_faults(data)
    faults += layout_faults(model, sections["parallel"])
    faults += tokenizer_faults(sections["tokenizer"])
    if not sections["tokenizer"].shared and model.tied in ("all", "inputs"):
        faults.append(
            "model.tied: expected decoder or none with a vocabulary for each side (tokenizer.shared=false), found "
            f"{model.tied}: one matrix cannot embed the tokens of two vocabularies"
        )
    faults += decode_faults(sections["decode"])
    if sections["checkpoint"].best_metric == "valid_bleu" and not sections["decode"].valid_sentences:
        faults.append(
            "checkpoint.best_metric: valid_bleu needs sentences to decode, found decode.valid_sentences=0; "
            "set it higher or use valid_nll"
        )
    if faults:
        raise faults_error(faults)


def _speed_faults(sections: Mapping[str, Any]) -> list[str]:
    """Faults of what makes training faster, together with how it is divided over processes."""
    names = ("model", "data", "train", "parallel", "precision")
    model, data, train, parallel, precision = (sections[name] for name in names)
    faults = []
    if data.packing and parallel.pp > 1:
        faults.append(
            f"data.packing: expected false with parallel.pp={parallel.pp} (stages hand padded batches to each other), "
            "found true"
        )
    if precision.dtype == "fp16" and parallel.zero_stage == 0:
        faults.append(
            "precision.dtype: fp16 needs the loss scale that ZeRO's optimizers keep, found parallel.zero_stage=0; set "
            "it to 1, or use bf16"
        )
    if precision.dtype == "fp16" and parallel.pp > 1:
        faults.append(
            f"precision.dtype: expected bf16 or fp32 with parallel.pp={parallel.pp} (each stage would keep a loss "
            "scale of its own), found fp16"
        )
    unlike = {
        f"parallel.tp={parallel.tp}": parallel.tp > 1,
        f"parallel.pp={parallel.pp}": parallel.pp > 1,
        "data.packing=true": data.packing,
        f"model.self_attention={model.self_attention}": model.self_attention != "full",
        "model.positions=relative": model.positions == "relative",
        "train.kernels=native": train.kernels == "native",
        "model.attention=flex": model.attention == "flex",
        f"train.activation_checkpointing={train.activation_checkpointing}": (
            train.activation_checkpointing in ("attention", "feed_forward")
        ),
    }
    if train.compile and (found := [key for key, present in unlike.items() if present]):
        faults.append(f"train.compile: expected false with {' and '.join(found)} (they break its graphs), found true")
    return faults


def _model_faults(model: ModelConfig, data: DataConfig) -> list[str]:
    """Faults of the model's parts together."""
    faults = []
    if model.heads % model.key_value_heads:
        faults.append(f"model.kv_heads: expected a divisor of model.heads={model.heads}, found {model.kv_heads}")
    if model.positions == "rotary" and model.key_width % 2:
        faults.append(
            f"model.positions: rotary turns pairs of features, so d_k must be even, found {model.key_width}; "
            "change model.d_k or model.heads"
        )
    if model.positions == "relative" and (
        model.relative_buckets % 2 or 2 * model.relative_distance <= model.relative_buckets
    ):
        faults.append(
            "model.relative_buckets: expected an even number (half of them for each direction) below twice "
            f"model.relative_distance={model.relative_distance}, found {model.relative_buckets}"
        )
    if model.attention == "flex" and (model.attention_dropout or model.positions == "relative"):
        faults.append(
            "model.attention: flex has no dropout of its weights and no bias of its scores, found "
            f"model.attention_dropout={model.attention_dropout} and model.positions={model.positions}; change these, "
            "or take auto"
        )
    if model.self_attention == "linear":
        if model.positions in ("rotary", "relative"):
            faults.append(
                f"model.self_attention: linear has no scores that model.positions={model.positions} could act on; "
                "choose positions of the input, as sinusoidal"
            )
        if model.attention_dropout:
            faults.append(
                "model.attention_dropout: expected 0 with model.self_attention=linear, which has no weights to drop, "
                f"found {model.attention_dropout}"
            )
    if model.positions == "learned" and data.max_length >= model.max_positions:
        faults.append(
            f"model.max_positions: expected more than data.max_length={data.max_length} (EOS takes a position too), "
            f"found {model.max_positions}"
        )
    return faults


def decode_faults(decode: DecodeConfig) -> list[str]:
    """Faults that span several keys of section decode."""
    if decode.n_best > decode.beam:
        return [f"decode.n_best: expected at most decode.beam={decode.beam}, found {decode.n_best}"]
    return []


def make_config(sections: Mapping[str, Any]) -> Config:
    """The `Config` of checked sections."""
    return Config(**sections)


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, readable by `read_config`."""
    return to_yaml({f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


def config_from_yaml(text: str) -> Config:
    """The configuration that `config_to_yaml` wrote."""
    layers = Layers()
    layers.merge(yaml.safe_load(text), "by another rank")
    return make_config(build_sections(layers, SECTIONS))


def read_config(path: Path) -> Config:
    """The configuration that a run saved. Raises InputError or ConfigError."""
    return make_config(read_saved_sections(path, SECTIONS))


def differences(one: Config, other: Config) -> list[tuple[str, object, object]]:
    """(key, value in `one`, value in `other`) of every key that differs."""
    result = []
    for section in dataclasses.fields(Config):
        first, second = getattr(one, section.name), getattr(other, section.name)
        for field in dataclasses.fields(first):
            before, after = getattr(first, field.name), getattr(second, field.name)
            if before != after:
                result.append((f"{section.name}.{field.name}", before, after))
    return result


def forbidden_changes(saved: Config, asked: Config) -> list[tuple[str, object, object]]:
    """(key, saved value, value asked for) of each difference that a run cannot be resumed with."""
    return [
        (key, before, after)
        for key, before, after in differences(saved, asked)
        if key not in MAY_CHANGE and key.partition(".")[0] not in MAY_CHANGE_SECTIONS
    ]
