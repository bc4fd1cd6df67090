# syntax=docker/dockerfile:1
# slime v0.2.2 on NVIDIA GPUs.
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/slime-cuda.Dockerfile -t rlprobe/slime-cuda .
ARG BASE=slimerl/slime:v0.2.2
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/beside
LABEL org.rlprobe.image=slime-cuda org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY containers/requirements/beside.txt /opt/rlprobe/install/
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/slime-cuda.sh
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh torch ray slime msprobe.pytorch rlprobe
