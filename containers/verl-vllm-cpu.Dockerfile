# syntax=docker/dockerfile:1
# VeRL on a CPU with a real vLLM: generation by an inference engine, in an image.
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/verl-vllm-cpu.Dockerfile -t rlprobe/verl-vllm-cpu .
ARG BASE=debian:12.12-slim
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/verl-vllm-cpu
LABEL org.rlprobe.image=verl-vllm-cpu org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY requirements/lock.txt requirements/vllm-cpu.txt /opt/rlprobe/install/
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/verl-vllm-cpu.sh
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh torch ray verl msprobe.pytorch vllm rlprobe
