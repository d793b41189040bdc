"""The tap: a model provider that keeps every sampled token.

A deployed agent talks to it as it talks to its provider. What it sends is one conversation after another, each request
with the whole context; from these the tap recovers what the agent did to its context, and writes the same record that
the bridge writes for editors it can look into.

    dialects/   Anthropic's and OpenAI's wire formats, from and to the types in messages.py
    server.py   HTTP: who may ask; limits.py: how much, how long
    tap.py      the sessions that are open
    session.py  one rollout: its conversations, retries and cancelled turns
    pieces.py   messages as tokens; what the policy said comes back as the very ids it sampled
    contexts.py all contexts of a session as one tree of pieces
    log.py      everything a session knows, written down before it is answered
    chains.py, lineage.py, causes.py
                turns that continue each other -> conversations -> why a context was rewritten
    recovery.py all of that -> views and edits: the record
    drivers/    how to start an agent so that it talks to the tap, one file each
    run.py      one rollout from question to record
"""
