"""The rollout side: a policy that talks to tools while an editor rewrites its context, written down as records.

:mod:`.context` is the live context and its three verbs, :mod:`.editors` what uses them, :mod:`.session` the turn loop,
:mod:`.run` many of them at once. :mod:`.chat` turns messages into tokens, :mod:`.engine` samples, :mod:`.server` starts
an engine, :mod:`.tools` answers calls and :mod:`.reward` judges. Nothing here knows how records are trained on.
"""
