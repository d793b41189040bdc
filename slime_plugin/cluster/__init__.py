"""A cell as a job of slime: its command line, the checks before it starts, and its driver.

::

    arguments     a cell becomes slime's flags, each with its origin, and one YAML file for the plugin
    flags         the flags that exist (flags.txt): slime silently ignores a misspelt one
    job_problems  why a cell cannot run, found before the job is submitted
    prepare       questions for training and for evaluation
    driver        slime's own training loop, behind a check of its arguments
"""
