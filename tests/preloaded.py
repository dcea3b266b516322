"""What processes of tests/warm.py have imported when they start. A thread started here would be lost to them."""

import gc
import importlib

import torch
from torch.utils import tensorboard

from dist_tfm.engine.deepspeed_engine import import_deepspeed
from dist_tfm.training import dry_run

__all__ = ["dry_run", "tensorboard"]

torch.set_num_threads(1)
import_deepspeed(torch.device("cpu"))
# What the first optimizer and the first engine of a process import (torch's compiler, though nothing is compiled) takes
# another two seconds.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# DeepSpeed collects garbage by hand at every turn: without this each process would look through all of these modules,
# and copy the memory that it shares with the others by doing so.
gc.collect()
gc.freeze()
