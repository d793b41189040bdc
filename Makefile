# make check runs everything a change has to pass; see CONTRIBUTING.md.
.PHONY: check lint format test docs bench cost rollouts tap loop fuzz

check: lint test

lint: .venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/shellcheck -x launch/*.sh launch/*.sbatch launch/lib/*.sh docker/*.sh .ci/run
	MYPYPATH=launch/lib .venv/bin/mypy launch/lib/*.py docker/*.py

format: .venv
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

test:
	launch/test.sh

# Run the commands that README and docs show, and write down what they print now.
docs: .venv
	.venv/bin/python -m tests.documentation

# Numbers for docs/benchmarks.md.
bench: .venv
	.venv/bin/python -m benchmarks.records

# What an update costs under each method; seven minutes of one core.
cost: .venv
	.venv/bin/python -m benchmarks.cost

# What the turn loop costs beside a real engine; two minutes.
rollouts: .venv
	.venv/bin/python -m benchmarks.rollouts

# What the tap adds to a request; five minutes.
tap: .venv
	.venv/bin/python -m benchmarks.tap
	.venv/bin/python -m benchmarks.tap_engine

# Where the time of the quick start goes; two minutes.
loop: .venv
	.venv/bin/python -m benchmarks.loop

# A minute of damaged files thrown at the reader.
fuzz: .venv
	.venv/bin/python -m benchmarks.fuzz_reader

.venv: requirements.lock requirements.sglang requirements.torch pyproject.toml
	launch/setup.sh
	@touch .venv
