"""The training side: rows in, loss and gradients out, on the real megatron-core.

In the order of the data::

    tree_plan       parents of a row's tokens -> who attends to whom
    tree_sequence   the plan, the positions and the rows that the head predicts from, as Megatron's PackedSeqParams
    layers          core attention, rotary embedding and norm that follow a plan; attention/ has the kernels
    tree_model      a GPT made of them
    vocabulary      logits split over tensor-parallel ranks -> log-probabilities, entropy, KL
    loss            what is minimised, and the sums that become metrics
    logdiff         these sums by size and place
    distillation    SDCC's teacher pass and schedule; snapshot has the moving average of the weights
    pipeline        Megatron's pipeline schedule and data-parallel wrapper
    hf_weights      Hugging Face checkpoints in and out

Process groups are arguments, never globals; only :mod:`slime_plugin.train.process_groups` asks Megatron for them.
"""

from __future__ import annotations

import warnings

import torch

if not torch.cuda.is_available():
    # Where there is no GPU, Megatron warns that what needs one is missing, and torch that Megatron uses old names.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
