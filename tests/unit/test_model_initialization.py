"""Initial weights depend on (seed, canonical name, shape) and on nothing else."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.initialization import initial_value, initialize, mix
from dist_tfm.model.transformer import Transformer

torch.set_num_threads(1)
CONFIG = ModelConfig(encoder_layers=1, decoder_layers=1, d_model=64, d_ff=96, heads=4, d_k=8, d_v=24, norm="pre")


def weights(config: ModelConfig = CONFIG, seed: int = 1) -> dict[str, torch.Tensor]:
    model = Transformer(config, 500)
    initialize(model, seed)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_layer_starts_the_same_in_a_model_of_any_depth() -> None:
    shallow, deep = weights(), weights(replace(CONFIG, encoder_layers=6, decoder_layers=4))
    assert set(shallow) < set(deep)
    for name, value in shallow.items():
        assert torch.equal(value, deep[name]), name


def test_neither_the_global_generator_nor_the_norm_placement_matters() -> None:
    torch.manual_seed(3)
    first = weights()
    torch.manual_seed(4)
    second = weights(replace(CONFIG, norm="post"))
    for name, value in second.items():
        assert torch.equal(value, first[name]), name


def test_every_matrix_differs_from_every_other_and_between_seeds() -> None:
    values = {n: v.flatten()[:64] for n, v in weights().items() if v.dim() == 2}
    values |= {f"{n} (seed 2)": v.flatten()[:64] for n, v in weights(seed=2).items() if v.dim() == 2}
    assert len({tuple(v.tolist()) for v in values.values()}) == len(values)


def test_initialising_sets_every_element_whatever_stood_there() -> None:
    model = Transformer(CONFIG, 500)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    initialize(model, 1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights()[name])


def test_bf16_weights_are_the_rounded_fp32_ones() -> None:
    model = Transformer(CONFIG, 500).to(torch.bfloat16)
    initialize(model, 1)
    assert torch.equal(model.embedding.weight, weights()["embedding.weight"].bfloat16())


def test_distributions_are_the_documented_ones() -> None:
    for name, value in weights(replace(CONFIG, d_model=512, heads=8, d_ff=1024)).items():
        module, kind = name.split(".")[-2:]
        if kind == "bias":
            assert (value == 0).all(), name
        elif value.dim() == 1:
            assert (value == 1).all(), name
        elif module in ("query", "key", "embedding"):
            assert float(value.std()) == pytest.approx(512**-0.5, rel=0.03), name
            assert float(value.abs().max()) > 3 * 512**-0.5, f"{name} is normal, not uniform"
        else:
            bound = math.sqrt(6 / sum(value.shape))
            assert float(value.abs().max()) == pytest.approx(bound, rel=0.01), name
            assert float(value.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03), name


def test_token_embeddings_enter_the_model_with_variance_one() -> None:
    value = weights(replace(CONFIG, d_model=512))["embedding.weight"]
    assert float((value * 512**0.5).var()) == pytest.approx(1.0, abs=0.02)


def test_a_parameter_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"encoder\.layers\.0\.conv\.weight"):
        initial_value("encoder.layers.0.conv.weight", (2, 2), 1)
    with pytest.raises(ValueError, match="no initial value"):
        initialize(nn.ModuleDict({"conv": nn.Linear(2, 2)}), 1)


def test_mix_is_a_fixed_function_of_integers() -> None:
    """Every run on disk depends on these values: they must never change."""
    assert mix(1, 2, 3) == 3155219076727281641
    assert mix(0) == 5621864261735219286
    assert mix(True, 2, 3) == mix(1, 2, 3) == mix(*torch.tensor([1, 2, 3]).numpy())
    assert all(0 <= mix(i) < 2**63 for i in range(1000))
    assert len({mix(*ids) for ids in ((1,), (1, 0), (0, 1), (10,), (-1,), (1, 1), (11,))}) == 7
