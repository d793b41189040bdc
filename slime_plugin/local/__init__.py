"""The whole loop on one machine: Ray actors for rollouts and for training ranks, a real SGLang server, megatron-core.

It calls the functions of :mod:`slime_plugin.hooks` in slime's order and with slime's arguments, so what runs here is
what runs on a cluster. It has no dynamic filters and no asynchronous or partial rollouts. The run starts in
:func:`slime_plugin.local.loop.train`; ``memorywalker score`` and ``compare`` use :mod:`.score` and :mod:`.compare`.
"""
