"""The training side: rows in, loss and gradients out, on the real megatron-core.

Read it in the order of the data::

    batch      rows of several rollouts -> one packed micro-batch
    plan       its parents -> who attends to whom
    sequence   the plan, the positions and the rows the head predicts from, as Megatron's PackedSeqParams
    model      a GPT whose attention, positions and head follow that plan; attention/ has the kernels
    vocabulary logits split over tensor-parallel ranks -> log-probabilities, entropy, KL
    objective  what is minimised
    teacher    the no-gradient pass of SDCC
    step       Megatron's pipeline schedule around all of it
    weights    Hugging Face checkpoints in and out
    score      all of the above for one question: what does the trainer believe about these tokens?

Process groups are arguments, never globals; only :mod:`slime_plugin.megatron.parallel` asks Megatron for them.
Importing this package imports torch, importing its modules imports megatron-core.
"""
