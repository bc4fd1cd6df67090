# syntax=docker/dockerfile:1
# slime on a CPU: the stand-in that the tests have for it (tests/slime/standin/README.md says what a
# run with it proves), over the real megatron-core. To try a site's runtime, scheduler and store with
# slime's hooks, before a device is asked for.
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/slime-cpu.Dockerfile -t rlprobe/slime-cpu .
ARG BASE=debian:12.12-slim
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/verl-cpu
LABEL org.rlprobe.image=slime-cpu org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY requirements/lock.txt /opt/rlprobe/install/
COPY tests/slime/standin /opt/slime
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/slime-cpu.sh
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh torch ray megatron.core slime msprobe.pytorch rlprobe
