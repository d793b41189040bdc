"""Checks on the machine of a job that it computes what the method says: ``memorywalker verify``.

Every check takes what it tests from where training takes it, on the ranks of the cell, and compares it with an oracle
that is written differently (:mod:`.oracles`). CPU and GPU run the same code; device, data type and limits differ
(:mod:`.settings`). One file per check, listed in :mod:`.checks`.
"""
