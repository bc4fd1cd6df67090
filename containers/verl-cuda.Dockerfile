# syntax=docker/dockerfile:1
# VeRL 0.9.1 on NVIDIA GPUs.
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/verl-cuda.Dockerfile -t rlprobe/verl-cuda .
ARG BASE=verlai/verl:vllm024.dev2
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/beside
LABEL org.rlprobe.image=verl-cuda org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY containers/requirements/beside.txt /opt/rlprobe/install/
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/verl-cuda.sh
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh torch ray verl msprobe.pytorch rlprobe
