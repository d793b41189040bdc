"""The command line, ``memorywalker``. Commands are loaded when they are called, so that ``--help`` is immediate."""
