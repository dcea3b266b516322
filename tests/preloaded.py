"""What processes of tests/warm.py have imported when they start: heavy packages, and nothing of ours.

A thread started here would be lost to them, and so would what a module reads from its surroundings when it is imported.
"""

import gc
import importlib

import torch

from dist_tfm.engine.deepspeed_engine import import_deepspeed

torch.set_num_threads(1)
import_deepspeed(torch.device("cpu"))
# Torch's compiler, which ZeRO stage 3 and torch's own optimizers import though nothing is compiled, takes two seconds.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# What most programs import besides (not sacrebleu, which reads where its cache is when it is imported).
for name in (
    "pydantic",
    "safetensors.torch",
    "sentencepiece",
    "torch.utils.tensorboard",
    "yaml",
    "zstandard",
):
    importlib.import_module(name)
# DeepSpeed collects garbage by hand at every turn: without this each process would look through all of these modules,
# and copy the memory that it shares with the others by doing so.
gc.collect()
gc.freeze()
