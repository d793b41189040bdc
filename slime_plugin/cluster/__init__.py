"""A cell as a job of slime's: its command line, what it needs, and what stops it before it costs GPU hours.

::

    arguments   a cell becomes slime's flags, each with where it comes from, and one nested YAML for the plugin
    flags       the flags there are (flags.txt), because slime drops a misspelt one without a word
    problems    what cannot be run, told before a job is submitted
    plan        memory, tokens and time per GPU, on paper: from workload (what a rollout amounts to), memory and phases
    prepare     questions to train on and questions to evaluate on, which never meet
    driver      slime's own training loop, behind a check of the arguments it was given
"""
