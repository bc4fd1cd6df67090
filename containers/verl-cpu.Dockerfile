# syntax=docker/dockerfile:1
# VeRL on a CPU: what make align runs, in an image.
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/verl-cpu.Dockerfile -t rlprobe/verl-cpu .
ARG BASE=debian:12.12-slim
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/verl-cpu
LABEL org.rlprobe.image=verl-cpu org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY requirements/lock.txt /opt/rlprobe/install/
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/verl-cpu.sh
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh torch ray verl msprobe.pytorch rlprobe
