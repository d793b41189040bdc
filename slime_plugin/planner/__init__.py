"""Memory, tokens and time of a cluster job, computed without a GPU: ``memorywalker plan``."""
