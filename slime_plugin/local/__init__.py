"""The whole loop on one machine: Ray actors for rollout and for training ranks, a real SGLang server, megatron-core.

It calls the functions of :mod:`slime_plugin.hooks` in slime's order and with slime's arguments, so what runs here is
what runs on a cluster. It is not a second framework: no dynamic filters, no asynchronous or partial rollouts.

::

    driver      the loop: rollouts, training, weights, metrics, checkpoints; what is begun is ended
    rollout     the actor that owns the engine: questions in, train data out, every rollout written down as it ends
    rank        an actor per training process
    data        which questions are asked in which iteration
    schedule    a batch, split over update steps, replicas and micro-batches
    passes      Megatron's schedule around packed micro-batches: log-probabilities, updates
    optimizer   Adam, with the gradient clipped
    checkpoint  the state of a rank as tensors and JSON
    settings    what a run was begun with, and what may change when it goes on
    processes   what a run has started, by process id
    sample      slime's sample
"""
