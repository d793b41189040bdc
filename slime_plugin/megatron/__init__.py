"""The training side: rows in, loss and gradients out, on the real megatron-core.

Read it in the order of the data::

    batch       rows of several rollouts -> one packed micro-batch
    plan        its parents -> who attends to whom
    sequence    the plan, the positions and the rows the head predicts from, as Megatron's PackedSeqParams
    model       a GPT whose attention, positions and head follow that plan; attention/ has the kernels
    vocabulary  logits split over tensor-parallel ranks -> log-probabilities, entropy, KL
    objective   what is minimised
    teacher     the no-gradient pass of SDCC
    loss        all that the last stage does with its logits in an update
    step        Megatron's pipeline schedule around all of it
    update      one update step: from rollouts to gradients
    weights     Hugging Face checkpoints in and out
    score       a forward pass for one question: what does the trainer believe about these tokens?
    compare     the same records under several methods: how far each trainer is off, and what an update costs

Process groups are arguments, never globals; only :mod:`slime_plugin.megatron.parallel` asks Megatron for them.
"""

from __future__ import annotations

import warnings

import torch

if not torch.cuda.is_available():
    # Where there is no GPU, Megatron warns that what needs one is missing, and torch that Megatron uses old names.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
