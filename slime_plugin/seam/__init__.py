"""What slime asks of a plugin, in slime's shapes: samples and train data where it rolls out, packed micro-batches where
it trains. The functions that slime is told by name are in :mod:`slime_plugin.hooks` and only call what is here.

::

    names       the hooks by flag and import path
    contract    how slime calls them, and a check that the installed slime and Megatron do so
    refusals    arguments that slime accepts and that would train something else
    args        where the configuration is: one nested key of slime's arguments
    rollout     a sample of slime's becomes a rollout of the bridge, and its record rides on the sample
    train_data  records of a batch become rows, with everything the trainer needs per token
    statistics  what edits did to a batch, and what the method makes of it
    packed      which tokens a rank holds, and which of its logits predict which trained tokens
    model       the model for trees, called as slime calls a model
    retention   how many of slime's checkpoints are kept
    memory      what SDCC's schedule has come to, from one job to the next
    training    what a training process keeps between hooks: SDCC's teacher, schedule and moving average; the loss

The rollout modules need no Megatron, the training modules no engine. slime's facts: its commit 624b824.
"""
