# The command line and the test suite on a CPU.
#   docker build -f docker/cpu.Dockerfile -t memorywalker:cpu .
#   docker run --rm -v "$PWD/runs:/runs" memorywalker:cpu record stats /runs
#   docker run --rm --entrypoint launch/test.sh memorywalker:cpu
FROM python:3.11-slim

WORKDIR /opt/memorywalker
COPY . .
RUN launch/setup.sh
ENTRYPOINT ["/opt/memorywalker/.venv/bin/memorywalker"]
