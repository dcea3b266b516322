"""What processes of tests/warm.py have imported when they start. A thread started here would be lost to them."""

import torch

from dist_tfm.engine.deepspeed_engine import import_deepspeed

torch.set_num_threads(1)
import_deepspeed(torch.device("cpu"))
