"""The tap: a model provider that keeps every sampled token.

A deployed agent talks to it as it talks to its provider, and sends the whole context with every request. Package
``recovery`` recovers from these what the agent did to its context, package ``agents`` starts the agents.

    wire/            Anthropic's and OpenAI's wire formats, from and to the types in payload.py
    server.py        HTTP routes and answers; limits.py: limits on requests and connections
    tap.py           the open sessions and their tokens
    tap_session.py   one rollout: its turns, retries and cancelled turns
    blocks.py        messages as tokens; a turn that comes back keeps the ids that were sampled
    context_tree.py  all contexts of a session as one tree of blocks
    session_log.py   everything a session knows, written before it is answered
"""
