"""Rollouts with editors: the policy calls tools while an editor rewrites its context; every rollout leaves a record.

:mod:`.context` is the live context and its three verbs, :mod:`.editors` use them, :mod:`.turn_loop` runs one rollout,
:mod:`.runner` many. :mod:`.chat` renders messages as tokens, :mod:`.engine` samples, :mod:`.server` starts engines,
:mod:`.tools` execute calls and :mod:`.reward` judges. Nothing here depends on training.
"""
