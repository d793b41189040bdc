"""The plugin side of slime's interface, in slime's shapes. The functions that slime calls by name are in
:mod:`slime_plugin.hooks`, and delegate to this package::

    hook_names    the hooks by flag and import path
    contract      how slime calls them, and a check that the installed slime and Megatron do so
    args          the configuration in slime's arguments
    refusals      configurations and arguments that would train something other than intended
    samples       rolls out slime's samples; a sample carries its record
    recording     writes and replays the records of a job
    batch         lays out a batch once: train data and metrics
    packed_batch  which tokens a rank holds, and which of its logits predict which trained tokens
    packed_model  the model for trees, called as slime calls a model
    training      the state of a training process between hooks; the loss
    distiller     SDCC's teacher, schedule and moving average between hooks
    retention     removes old checkpoints of slime

The rollout modules need no Megatron, the training modules no engine. Verified with slime's commit 624b824.
"""
